"""Edits of scenes: deterministic, true to their instruction, and without held-out pictures in training."""

import numpy as np
import pytest

from patchedserve.data.emoji.art import object_names
from patchedserve.data.emoji.edits import KIND_WEIGHTS, EditDataset, SceneEdit, sample_edit
from patchedserve.data.emoji.scene import TINTS, Scene, is_heldout, recoloured, render, with_article
from patchedserve.data.resolution import Resolution

SIZE = Resolution(128, 128)


def edits_of(split, number: int = 400) -> list[SceneEdit]:
    rng = np.random.default_rng(0)
    return [sample_edit(rng, SIZE, split) for _ in range(number)]


def combinations(scene: Scene) -> list[tuple[str, ...]]:
    names = scene.names
    return [(name, scene.background) for name in names] + ([names] if len(names) == 2 else [])


def test_edits_are_deterministic():
    dataset, again = EditDataset(SIZE, 4, "heldout", seed=3), EditDataset(SIZE, 100, "heldout", seed=3)
    assert dataset.edit(2) == again.edit(2)
    for one, other in zip(dataset.images(2), again.images(2), strict=True):
        assert one.tobytes() == other.tobytes()
    assert dataset.edit(1) != dataset.edit(2)
    assert dataset.edit(0) != EditDataset(SIZE, 4, "train", seed=3).edit(0)
    with pytest.raises(IndexError):
        dataset.edit(4)


def test_training_shows_no_heldout_combination_and_every_heldout_edit_does():
    for edit in edits_of("train"):
        for scene in (edit.before, edit.after):
            assert not any(is_heldout(*parts) for parts in combinations(scene)), edit.instruction
    for edit in edits_of("heldout"):
        shown = combinations(edit.before) + combinations(edit.after)
        assert any(is_heldout(*parts) for parts in shown), edit.instruction


def test_each_kind_changes_what_its_instruction_says_and_nothing_else():
    seen = set()
    for edit in edits_of("train"):
        before, after = edit.before, edit.after
        seen.add(edit.kind)
        if edit.kind == "background":
            assert before.placements == after.placements
            assert before.background != after.background == edit.colour
            assert edit.colour in edit.instruction or edit.instruction == "remove the background"
            continue
        assert (before.background, before.shade) == (after.background, after.shade)
        if edit.kind == "replace":
            pairs = list(zip(before.placements, after.placements, strict=True))
            changed = [(one.name, other.name) for one, other in pairs if one != other]
            assert set(changed) == {(edit.old, edit.new)}
            places = [(one.center_x, one.center_y, one.side, one.angle_deg) for one in before.placements]
            assert places == [(one.center_x, one.center_y, one.side, one.angle_deg) for one in after.placements]
        elif edit.kind == "remove":
            assert [one for one in before.placements if one.name != edit.old] == list(after.placements)
            assert len(before.placements) == 2
        else:
            assert after == recoloured(before, edit.colour)
            assert edit.colour in TINTS
            assert edit.colour != before.background
            assert edit.colour in edit.instruction
    assert seen == set(KIND_WEIGHTS)


def test_instructions_name_known_objects():
    rng = np.random.default_rng(1)
    for edit in edits_of("train", 100):
        assert {edit.old, edit.new} <= {"", *object_names()}
        words = {edit.in_words(rng) for _ in range(12)}
        assert len(words) > 1
        if edit.kind == "replace" and not edit.instruction.endswith("s"):
            assert all(with_article(edit.new) in each or edit.new.split()[0] in each for each in words)


@pytest.mark.parametrize("tint", TINTS)
def test_painted_drawing_keeps_its_outline_and_takes_the_colour(tint):
    scene = EditDataset(SIZE, 8).edit(1).before
    plain, painted = (np.asarray(render(each, SIZE)).astype(int) for each in (scene, recoloured(scene, tint)))
    background = np.abs(plain - np.array(scene.shade)).max(-1) <= 1
    assert background.mean() > 0.2
    assert (np.abs(painted - plain)[background] <= 1).all(), "nothing around the drawing changes"
    drawn = painted[~background].reshape(-1, 3)
    spread = np.abs(drawn - drawn.mean(1, keepdims=True)).max(1).mean()
    assert (spread < 12) == (tint == "gray"), "only grey has no hue"
