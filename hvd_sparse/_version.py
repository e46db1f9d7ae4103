"""The package's version; pyproject.toml and the wheel have it from here."""

__version__ = "0.2.0"
