"""Results as people see them: tables, plots, and HTML reports that need nothing but themselves.

`table` is one table in three forms, `tables` those of the commands, `words` how figures are written. `run_data` puts a
run's tables in order once, `theme` holds the colours, `over_time`, `plots` and the `*_plots` draw, `grid` lays out
images, and `page` fills in the templates; `html` writes the report of a run. Figures are built without pyplot, so no
global state is touched and any thread may draw.
"""
