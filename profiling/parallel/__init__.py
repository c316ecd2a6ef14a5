"""What several devices for one image cost, counted in models without weights, beside DistriFusion's own figures."""
