"""The report of one serve run: plots as PNG, an image grid, and one HTML file that needs nothing but itself.

`run_data` puts the tables in order once, `theme` holds the colours, `over_time` and `plots` draw, `grid` lays out
images, `page` is what all HTML reports share, and `html` writes that of a run. Figures are built without pyplot, so no
global state is touched and any thread may draw.
"""

from .grid import image_grid
from .html import write_report

__all__ = ["image_grid", "write_report"]
