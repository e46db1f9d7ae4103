"""What is made of a recording: summary, page, trace, and the live view."""
