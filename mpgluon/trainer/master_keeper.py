"""Masters for the Trainers of cast networks that have no loss scale."""

from __future__ import annotations

from collections.abc import Sequence

from mpgluon.errors import TrainerStateError
from mpgluon.trainer.gradient_flags import GradientFlags
from mpgluon.trainer.judgement import look
from mpgluon.updates import gluon_trainer
from mpgluon.updates.masters import keep_masters, make_masters
from mpgluon.updates.rounded_updates import NEAREST, grid_weights
from mpgluon.updates.weight_findings import check_weights

from mxnet import gluon

__all__ = ["ChecksWeights", "MasterKeeper", "keep_masters_of"]


class ChecksWeights:
    """Checks a Trainer's weights once before an update: the first one, or the first after a cast.

    Attributes
    ----------
    is_checked : bool
    """

    is_checked = False


class MasterKeeper(ChecksWeights):
    """Keeps the masters of a cast network's Trainer before each update, until it has a loss scale.

    Parameters
    ----------
    trainer : gluon.Trainer
        Its constructor may still be running.
    """

    def __init__(self, trainer: gluon.Trainer) -> None:
        self.trainer = trainer
        self._flags = GradientFlags(trainer)

    def has_overflow(self, parameters: Sequence[gluon.Parameter]) -> bool:
        """Skip no step; let masters follow weights that were set. Waits for the devices once.

        The first step logs, as ``init_trainer`` would, that updates are lost without masters; and
        that gradients which need a loss scale have none.

        Raises
        ------
        PrecisionError
            If the optimizer cannot update float16 weights without masters.
        TrainerStateError
            If gradients belong to a loss that was scaled for another Trainer, or if bfloat16
            weights are updated inside the kvstore, which does not support that format.
        """
        if not self.is_checked:
            check_weights(self.trainer, NEAREST.way, is_scaled=False)
            self.is_checked = True
        self._flags.use()
        self._flags.refuse_gradients_of_others(suspicious=False)
        self._flags.discard_others()
        if gluon_trainer.updates_in_kvstore(self.trainer) and grid_weights(parameters):
            raise TrainerStateError(
                "this Trainer updates weights inside its kvstore, which does not support "
                "bfloat16; create it with update_on_kvstore=False, or call "
                "amp.init_trainer(trainer) before the first step"
            )
        if not gluon_trainer.updates_in_kvstore(self.trainer):
            keep_masters(self.trainer)
            for one in look(self.trainer, parameters, gradients=[], factor=1.0).stale_masters:
                one.follow()
            make_masters(self.trainer)
        return False


def keep_masters_of(trainer: gluon.Trainer) -> None:
    """Give a Trainer of a cast network its keeper of masters, unless it has a loss scale."""
    state = gluon_trainer.loss_scaler_of(trainer)
    if state is None:
        gluon_trainer.set_loss_scaler(trainer, MasterKeeper(trainer))
    elif isinstance(state, ChecksWeights):
        state.is_checked = False
