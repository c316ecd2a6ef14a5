"""The figures and tables of the papers, measured by the benches of this house and kept beside the papers' numbers."""
