"""What the unit tests share."""

from hypothesis import settings

# No test is timed: a busy machine is not a fault.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
