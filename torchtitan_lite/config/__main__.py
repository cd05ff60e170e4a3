"""`python -m torchtitan_lite.config > docs/config.md` rewrites the page of keys."""

from .keys import format_config_page

print(format_config_page(), end="")
