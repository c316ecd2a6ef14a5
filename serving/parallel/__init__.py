"""DistriFusion: one image on several devices, as strips of rows (Li et al., CVPR 2024)."""
