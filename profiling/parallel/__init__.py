"""Cost of drawing one image on several devices, counted in models without weights, beside DistriFusion's figures."""
