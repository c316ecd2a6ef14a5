"""Presentation of results: tables, plots, and self-contained HTML reports.

`table` is one table in three forms, `tables` holds the tables of the commands, and `words` formats figures. `run_data`
sorts a run's tables once, `theme` holds the colours, `over_time`, `plots` and the `*_plots` draw, `grid` lays out
images, `page` fills in the templates, and `html` writes the report of a run. Figures are built without pyplot, so that
no global state is touched and any thread may draw.
"""
