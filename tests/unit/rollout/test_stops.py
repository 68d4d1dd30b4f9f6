"""Responses cut at stop texts."""

from megaverl.rollout.engine import Completion
from megaverl.rollout.stops import cut_at_stop

PIECES = ["The", " answer", " is", " #", "###", " 4", "2", "\n\n", "And"]


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def response(n=9):
    return Completion(3, 1, list(range(n)), [-0.1 * i for i in range(n)], "length")


def test_the_token_that_completes_the_text_is_the_last():
    for stops, length in ((["####"], 5), (["42"], 7), (["\n"], 8), (["42", "is"], 3), (["The"], 1), (["d"], 9)):
        cut = cut_at_stop(response(), stops, decode)
        assert cut.token_ids == list(range(length)), stops
        assert cut.log_probs == response().log_probs[:length]
        assert (cut.prompt, cut.sample, cut.finish) == (3, 1, "stop")


def test_a_response_without_it_stays_as_it_is():
    for stops in ([], ["none"], ["the"]):
        assert cut_at_stop(response(), stops, decode) == response()
    assert cut_at_stop(response(0), ["x"], decode) == response(0)
