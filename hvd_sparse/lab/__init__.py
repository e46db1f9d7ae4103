"""What is never imported by a training: simulator, report page, plots, plans without a run."""
