"""A block profile's figures of whole blocks, as in PatchedServe's figure 4."""

from pathlib import Path

import numpy as np
import pytest

from patchedserve.data.tables.block_facts import WHOLE_MODEL
from patchedserve.data.tables.schemas import BLOCKS, read_frame
from patchedserve.profiling.report.block_plots import WHOLE_THRESHOLD, summarize_block_changes

from ...support.block_profiles import write_profile


def test_block_change_is_the_mean_over_its_patches(tmp_path: Path) -> None:
    table = write_profile(tmp_path / "blocks.parquet", num_requests=6)
    found = summarize_block_changes(table)["whole_blocks"]
    assert found["threshold"] == WHOLE_THRESHOLD
    frame = read_frame(table, BLOCKS)
    frame = frame[(frame["lag"] == 1) & (frame["block"] != WHOLE_MODEL)]
    for kind, column in (("mse", "output_mse"), ("relative", "output_mse_normalised")):
        by_block = frame.groupby(["width", "request_id", "step", "block_index"], as_index=False).agg({column: "mean"})
        expected = {
            f"{width}x{width}": float(np.mean(np.asarray(of_width[column]) < WHOLE_THRESHOLD))
            for width, of_width in by_block.groupby("width")
        }
        assert found["shares"][kind] == pytest.approx(expected)
        for width, of_width in by_block.groupby("width"):
            wanted = of_width.groupby("request_id")[column].agg(lambda mse: float(np.mean(mse < WHOLE_THRESHOLD)))
            assert found["by_request"][kind][f"{width}x{width}"] == pytest.approx(list(wanted))
        assert 0 < min(expected.values()) <= max(expected.values()) < 1
