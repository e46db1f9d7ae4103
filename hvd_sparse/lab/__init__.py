"""Tools that a training never imports: simulator, report, plots, plans without a training.

Their user is the command `hvd-sparse`; scripts may import them, too.
"""
