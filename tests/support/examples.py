"""How many examples hypothesis tries."""

from hypothesis import settings


def at_least(count: int) -> settings:
    """`count` examples of what is cheap to try, and in a search as many as its profile says: a plain
    `settings(max_examples=...)` would overrule the profile."""
    return settings(max_examples=max(count, settings.default.max_examples))
