"""Places of a microbatch that are padded to a multiple of some length."""

import torch

from forkpoint.parallel.topology import PaddedPlaces


def test_padding_repeats_the_last_place_and_attention_sees_none_of_it() -> None:
    places = PaddedPlaces(4)
    assert places.own(5).tolist() == [0, 1, 2, 3, 4, 4, 4, 4] and places.padding(5) == 3
    assert places.own(8).tolist() == list(range(8)) and places.padding(8) == 0
    x_THD = torch.arange(16.0).reshape(8, 2, 1)
    (seen,) = places.to_heads((x_THD,), 5)
    assert torch.equal(seen, x_THD[:5])
    back = places.to_places(seen, 5)
    assert torch.equal(back[:5], seen) and back.shape == x_THD.shape and not back[5:].any()
