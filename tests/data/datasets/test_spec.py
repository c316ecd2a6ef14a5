"""Options of data sets within their spec, as `--dataset` accepts them."""

import inspect
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchedserve.data.datasets.registry import OPENERS, open_dataset
from patchedserve.data.datasets.sample_cache import sample_key
from patchedserve.data.datasets.spec import SPEC_OPTIONS, DatasetSpec, parse_spec
from patchedserve.data.errors import UsageError

from ...support.caption_sets import coco_content, encoded, scene_image, write_coco, write_diffusiondb


def test_every_option_can_be_given_in_a_spec_and_is_documented() -> None:
    for kind, opener in OPENERS.items():
        parameters = inspect.signature(opener).parameters.values()
        assert SPEC_OPTIONS[kind] == tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
        for name in SPEC_OPTIONS[kind]:
            assert f"{name}=" in (parse_spec.__doc__ or "")
    assert SPEC_OPTIONS.keys() == OPENERS.keys()


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("coco:/x", DatasetSpec("coco", "/x", {})),
        ("coco:/x?split=a&image_dir=a=b:c", DatasetSpec("coco", "/x", {"split": "a", "image_dir": "a=b:c"})),
        ("diffusiondb:hub?max_nsfw=0.3&config=c", DatasetSpec("diffusiondb", "hub", {"max_nsfw": 0.3, "config": "c"})),
        ("parquet:C:/x?id_column=a%26b%3F c", DatasetSpec("parquet", "C:/x", {"id_column": "a&b? c"})),
        ("captions:what?/x.csv?id_column=n", DatasetSpec("captions", "what?/x.csv", {"id_column": "n"})),
        ("emoji", DatasetSpec("emoji", "", {})),
        ("emoji?resolution=64&num_images=5", DatasetSpec("emoji", "", {"resolution": "64", "num_images": 5})),
        ("emoji:?data_seed=2", DatasetSpec("emoji", "", {"data_seed": 2})),
    ],
)
def test_specs_are_parsed(spec: str, parsed: DatasetSpec) -> None:
    assert parse_spec(spec) == parsed
    assert [type(value) for value in parse_spec(spec).options.values()] == [type(v) for v in parsed.options.values()]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("coco:/x?max_nsfw=0.3", "max_nsfw is not an option of the data set coco, whose options are: split, image_dir"),
        ("emoji?colour=a", "whose options are: split, resolution, num_images, data_seed"),
        ("diffusiondb:/x?max_nsfw=low", "max_nsfw is 'low', but it must be a number from 0 to 2"),
        ("emoji?num_images=2.5", "num_images is '2.5', but it must be a whole number from 1"),
        ("coco:/x?", "'' is not an option NAME=VALUE, and no such path exists"),
        ("coco:/x?split", "'split' is not an option NAME=VALUE"),
        ("coco:/x?split=", "'split=' is not an option NAME=VALUE"),
        ("coco:/x?split=a&", "'' is not an option NAME=VALUE"),
        ("coco:/x?split=a&split=b", "split is given twice"),
        ("coco:?split=a", "needs a path: coco:PATH"),
        ("coco?split=a", "needs a path: coco:PATH"),
        ("imagenet?split=a", "must be one of: coco:PATH"),
    ],
)
def test_invalid_options_give_a_one_line_error(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_out_of_range_and_options_given_twice_are_refused(tmp_path: Path) -> None:
    root = write_diffusiondb(tmp_path)
    for value in ("-1", "nan", "2.1"):
        with pytest.raises(UsageError, match="must be a number from 0 to 2"):
            open_dataset(f"diffusiondb:{root}?max_nsfw={value}")
    with pytest.raises(UsageError, match="max_nsfw is given twice"):
        open_dataset(f"diffusiondb:{root}?max_nsfw=0.1", max_nsfw=0.1)


def test_existing_path_may_contain_a_question_mark(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "what?split=train2017")
    write_coco(root, coco_content(2), split="train2017")
    with pytest.raises(UsageError, match=r"train2017: holds the splits train2017, val2017"):
        open_dataset(f"coco:{root}")
    assert len(list(open_dataset(f"coco:{root}?split=train2017").entries())) == 2
    assert len(list(open_dataset(f"coco:{root}?split=val2017").entries())) == 6


def test_sample_key_contains_every_option(tmp_path: Path) -> None:
    coco = write_coco(write_coco(tmp_path / "coco", split="train2017"), split="val2017")
    (tmp_path / "moved").mkdir()
    pictures = write_diffusiondb(tmp_path / "db")
    (tmp_path / "c.csv").write_text("id,caption,text,n\na,b,c,1\n")
    for split in ("train", "test"):
        (tmp_path / "folder" / split).mkdir(parents=True)
        (tmp_path / "folder" / split / "metadata.csv").write_text("file_name,caption,text\nx.png,a,b\n")
        columns = {name: ["a"] for name in ("caption", "text", "id", "n")}
        images = pa.array([encoded(scene_image(0))], pa.binary())
        (tmp_path / "table" / split).mkdir(parents=True)
        pq.write_table(pa.table(columns | {"image": images, "other": images}), tmp_path / "table" / split / "x.parquet")
    specs = [
        f"coco:{coco}?split=train2017",
        f"coco:{coco}?split=val2017",
        f"coco:{coco}?split=val2017&image_dir={tmp_path / 'moved'}",
        f"diffusiondb:{pictures}",
        f"diffusiondb:{pictures}?max_nsfw=0.3",
        f"diffusiondb:{pictures}?max_nsfw=0.4",
        f"imagefolder:{tmp_path}/folder?split=train",
        f"imagefolder:{tmp_path}/folder?split=test",
        f"imagefolder:{tmp_path}/folder?split=test&caption_column=text",
        f"parquet:{tmp_path}/table?split=train",
        f"parquet:{tmp_path}/table?split=test",
        f"parquet:{tmp_path}/table?split=test&caption_column=text",
        f"parquet:{tmp_path}/table?split=test&image_column=other",
        f"parquet:{tmp_path}/table?split=test&id_column=n",
        f"captions:{tmp_path}/c.csv",
        f"captions:{tmp_path}/c.csv?caption_column=text",
        f"captions:{tmp_path}/c.csv?id_column=n",
        "emoji",
        "emoji?resolution=64",
        "emoji?num_images=9",
        "emoji?data_seed=1",
    ]
    keys = [str(sample_key(open_dataset(spec).fingerprint(), 5, 0)) for spec in specs]
    assert len(set(keys)) == len(specs)


def test_specs_are_read_without_heavy_imports() -> None:
    program = "import sys, patchedserve.data.datasets.spec; print({'torch', 'pyarrow', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
