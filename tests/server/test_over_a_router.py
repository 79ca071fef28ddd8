"""What holds of a server over an engine holds over a router, too: errors, and that nothing stays at the replica of what is given up.

Left out is what a router does otherwise: it waits for a replica that loads, goes on elsewhere where one dies, reads ahead of its clients.
"""

from __future__ import annotations

import pytest
from test_cancellation import (
    test_a_crowd_that_leaves_in_every_way_at_once,
    test_a_deadline_that_has_passed_computes_nothing,
    test_a_request_that_is_given_up,
    test_cancel_requests_in_every_phase,
    test_leaving_between_the_last_token_and_the_status,
    test_leaving_right_after_the_last_event,
)
from test_errors import (
    test_a_failed_stream_is_closed,
    test_a_full_queue_is_exhausted_with_a_retry_hint,
    test_a_request_id_in_use_already_exists,
    test_all_bad_fields_are_named_while_another_stream_goes_on,
    test_another_model_is_not_found,
    test_cancel_requests_takes_1_to_1024_ids,
    test_huge_violations_fit_into_a_header,
    test_the_largest_refusal_reaches_the_client_whole,
    test_what_does_not_fit_says_how_much_would,
    test_what_the_engine_refuses_is_an_invalid_argument,
)

__all__ = [
    "test_a_crowd_that_leaves_in_every_way_at_once",
    "test_a_deadline_that_has_passed_computes_nothing",
    "test_a_failed_stream_is_closed",
    "test_a_full_queue_is_exhausted_with_a_retry_hint",
    "test_a_request_id_in_use_already_exists",
    "test_a_request_that_is_given_up",
    "test_all_bad_fields_are_named_while_another_stream_goes_on",
    "test_another_model_is_not_found",
    "test_cancel_requests_in_every_phase",
    "test_cancel_requests_takes_1_to_1024_ids",
    "test_huge_violations_fit_into_a_header",
    "test_leaving_between_the_last_token_and_the_status",
    "test_leaving_right_after_the_last_event",
    "test_the_largest_refusal_reaches_the_client_whole",
    "test_what_does_not_fit_says_how_much_would",
    "test_what_the_engine_refuses_is_an_invalid_argument",
]

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("over_a_router")]
