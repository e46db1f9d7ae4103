"""Reads recordings: `log` parses them, and the others make a page, a trace or a live view."""
