"""The loss over a vocabulary that is split over ranks equals the loss over the whole one."""

import pytest
from launching import FOLDER, finish

pytestmark = pytest.mark.timeout(120)


# ----- CrossEntropy: loss parallel -----
def test_every_rank_has_the_whole_loss_and_its_part_of_the_gradients() -> None:
    """Split evenly, and unevenly."""
    finish(str(FOLDER / "loss_worker.py"), "64", "37", processes=2)
