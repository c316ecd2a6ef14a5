"""Quality cost and time savings of the patch cache (`psctl bench cache`)."""
