"""Effect of drawing on several ranks on images: DistriFusion's table 1 and figures 7 and 8."""
