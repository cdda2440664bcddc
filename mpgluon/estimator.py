"""Training with ``gluon.contrib.estimator`` in 16 bits: a batch processor that scales the loss.

::

    amp.init_trainer(trainer)
    estimator = Estimator(
        net, loss, trainer=trainer, batch_processor=mpgluon.estimator.BatchProcessor()
    )
    estimator.fit(train_data, epochs=10)

The Estimator's own update handler calls ``trainer.step``, which divides by the loss scale.
"""

from __future__ import annotations

from typing import Any

from mpgluon import amp
from mpgluon.cast.numpy_arrays import as_nd

from mxnet import autograd
from mxnet.gluon.contrib import estimator as gluon_estimator
from mxnet.ndarray import NDArray

__all__ = ["BatchProcessor"]

_Results = tuple[list[NDArray], list[NDArray], list[NDArray], list[NDArray]]


class BatchProcessor(gluon_estimator.BatchProcessor):
    """Gluon's batch processor with a scaled loss, on any devices.

    The Estimator's Trainer needs a loss scale: call ``amp.init_trainer(trainer)`` before ``fit``.
    """

    def fit_batch(
        self, estimator: gluon_estimator.Estimator, train_batch: Any, batch_axis: int = 0
    ) -> _Results:
        """Run forward and backward on a batch.

        Parameters
        ----------
        estimator : Estimator
        train_batch : sequence
            Data and labels.
        batch_axis : int
            The axis along which both are split over the Estimator's devices.

        Returns
        -------
        data, label, pred, loss : list of NDArray
            One of each for each device; the losses before they are scaled. Arrays of MXNet's NumPy
            interface become arrays of ``mx.nd``: its metrics take no others.

        Raises
        ------
        TrainerStateError
            If the Estimator's Trainer has no loss scale yet.
        """
        data, label = self._get_data_and_label(train_batch, estimator.context, batch_axis)
        with autograd.record():
            pred = [estimator.net(one) for one in data]
            loss = [estimator.loss(*pair) for pair in zip(pred, label)]
            with amp.scale_loss(loss, estimator.trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        results: _Results = as_nd((data, label, pred, loss))
        return results

    def evaluate_batch(
        self, estimator: gluon_estimator.Estimator, val_batch: Any, batch_axis: int = 0
    ) -> _Results:
        """Run forward on a batch, and return what :meth:`fit_batch` does."""
        results: _Results = as_nd(super().evaluate_batch(estimator, val_batch, batch_axis))
        return results
