"""What drawing on several ranks does to images: DistriFusion's table 1 and figures 7 and 8."""
