"""Packs `data/emoji/art.zip` from the npm package of Fluent emoji: the drawings that are used, and their names.

npm pack @iconify-json/fluent-emoji-flat@1.2.6 && tar xzf iconify-json-fluent-emoji-flat-1.2.6.tgz
python -m patchedserve.training.bundled.pack_art package/icons.json
"""

import json
import sys
import zipfile
from pathlib import Path

from ...data.emoji.art import ART_FILE
from ...data.files import atomic_write

NAMES = """
cool face, love face, skull, ghost, alien, robot, heart, monkey, dog, fox, raccoon, cat, lion, unicorn, zebra, cow,
pig, giraffe, elephant, rabbit, hedgehog, bat, bear, koala, panda, chicken, chick, penguin, duck, owl, flamingo,
parrot, frog, crocodile, turtle, snake, t-rex, whale, fish, octopus, jellyfish, crab, snail, butterfly, bee, ladybug,
spider, rose, sunflower, tulip, potted plant, pine tree, palm tree, cactus, shamrock, maple leaf, mushroom, grapes,
watermelon, orange, lemon, banana, pineapple, red apple, green apple, pear, cherries, strawberry, kiwi, tomato,
avocado, eggplant, carrot, corn, broccoli, pretzel, cheese, hamburger, fries, pizza, taco, ice cream, doughnut,
cookie, cupcake, lollipop, coffee cup, teapot, wine glass, house, castle, bus, red car, tractor, bicycle, anchor,
sailboat, airplane, rocket, alarm clock, moon, sun, planet, star, rainbow, umbrella, snowflake, snowman, fire,
droplet, pumpkin, balloon, gift, trophy, soccer ball, basketball, crown, top hat, diamond, guitar, candle, light bulb,
key, bomb, magnet, envelope
"""

# Names in the package where they differ from ours with hyphens.
PACKAGE_NAMES = {
    "love face": "smiling-face-with-heart-eyes",
    "cool face": "smiling-face-with-sunglasses",
    "heart": "red-heart",
    "chick": "baby-chick",
    "bee": "honeybee",
    "ladybug": "lady-beetle",
    "pine tree": "evergreen-tree",
    "corn": "ear-of-corn",
    "cheese": "cheese-wedge",
    "fries": "french-fries",
    "coffee cup": "hot-beverage",
    "red car": "automobile",
    "planet": "ringed-planet",
    "gift": "wrapped-gift",
    "kiwi": "kiwi-fruit",
    "diamond": "gem-stone",
    "orange": "tangerine",
    "pumpkin": "jack-o-lantern",
    "moon": "crescent-moon",
}
FIXED_DATE = (2026, 1, 1, 0, 0, 0)  # so that the same drawings give the same file


def pack(icons_file: Path, target: Path = ART_FILE) -> int:
    """Write the chosen drawings as SVG files into a zip; returns their number. Raises KeyError for a missing icon."""
    icons = json.loads(icons_file.read_text(encoding="utf-8"))["icons"]
    names = sorted(" ".join(name.split()) for name in NAMES.split(","))
    with atomic_write(target) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            body = icons[PACKAGE_NAMES.get(name, name.replace(" ", "-"))]["body"]
            entry = zipfile.ZipInfo(f"{name}.svg", FIXED_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(
                entry, f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{body}</svg>\n', compresslevel=9
            )
    return len(names)


if __name__ == "__main__":
    sys.stdout.write(f"{pack(Path(sys.argv[1]))} drawings in {ART_FILE}\n")
