"""Loss scaling on a GPU: tests of the CPU's, run again where arrays are on the GPU by default."""

import pytest
from test_amp import (  # noqa: F401
    test_a_step_repeated_with_stale_gradients_ignored_is_still_divided_and_clipped,
    test_step_was_skipped_is_about_the_latest_step_and_skipped_steps_counts_all,
    test_two_losses_before_one_step_train_like_their_sum,
)
from test_clipping import (  # noqa: F401
    test_an_overflow_in_a_clipped_run_leaves_the_weights_of_a_run_without_that_batch,
    test_clipping_returns_the_norm_of_the_unscaled_gradients_and_writes_none,
    test_the_norm_is_right_where_squares_leave_float32_and_where_all_gradients_are_zero,
    test_the_norm_of_a_skipped_step_is_infinite_or_nan,
    test_the_norm_of_float16_gradients_whose_true_values_underflow_is_exact,
)
from test_control_runs import (  # noqa: F401
    test_a_static_scale_skips_the_overflow_and_stays,
    test_a_step_without_a_scaled_loss_divides_nothing_and_keeps_the_scale_but_skips_an_overflow,
    test_an_injected_overflow_leaves_the_weights_of_a_run_without_that_batch,
    test_an_overflow_in_accumulated_gradients_discards_that_window_and_no_other,
    test_scaling_fp32_training_by_a_power_of_two_changes_no_bit,
    test_the_control_run_would_notice_a_missing_batch_and_a_missing_division,
    test_without_a_loss_scale_an_infinite_gradient_reaches_the_weights_as_in_plain_gluon,
)
from test_master_weights import (  # noqa: F401
    test_multi_precision_masters_begin_with_the_weight_before_it_was_rounded,
    test_multi_precision_rescale_grad_is_applied_in_fp32_so_the_scale_belongs_there,
)
from test_reductions import (  # noqa: F401
    test_a_bad_element_is_found_among_more_arrays_than_an_operator_takes,
    test_a_bad_element_is_found_behind_one_whose_square_overflows,
    test_elements_whose_squares_overflow_float32_are_finite,
    test_the_norm_is_numpys_up_to_the_roundings_of_a_float32_sum,
    test_the_norm_of_float16_elements_of_256_is_not_infinite,
)

pytestmark = pytest.mark.gpu


def test_the_tests_above_run_on_the_gpu(gpu):
    from amp_helpers import batches, make_net

    assert make_net("float16")[0].weight.data().context == gpu
    assert {array.context for batch in batches() for array in batch} == {gpu}
