"""A training run in a terminal: what it prints, and its exit status."""

from __future__ import annotations

import logging
import sys
from typing import Optional

import mpgluon
from mpgluon.distributed import Processes
from mpgluon_tools.commands.arguments import width
from mpgluon_tools.tables import Table, counted

from recipes.options import in_options
from recipes.training import InterruptedRunError, TrainingConfig, train
from recipes.training.checkpoints import Resume, checkpoints_of
from recipes.training.dataset import Dataset

__all__ = ["run"]

_SAME = "the same command continues"


def run(
    config: TrainingConfig,
    processes: Processes,
    *,
    resume: Resume,
    dataset: Optional[Dataset] = None,
    advice: str = "more --epochs, or --loss-scale measured",
    weights_option: str = "--pretrained",
) -> int:
    """Train, let rank 0 print the result, and return the exit status.

    `recipes.training.train` describes the arguments; ``advice`` is for a run whose steps were all
    skipped, and ``weights_option`` is the command's name of ``config.pretrained``. The status is 2
    after bad input, and 128 and a signal's number after that signal.
    """
    several = processes.world_size > 1
    logging.basicConfig(
        format=f"rank {processes.rank}: %(message)s" if several else "%(message)s",
        level=logging.INFO if processes.is_first else logging.WARNING,
    )
    who = f"rank {processes.rank}: " if several else ""
    if processes.is_first:
        policy = config.policy
        print(
            f"{config.model} on {config.dataset}: parameters {policy.param_dtype}, computation "
            f"{policy.compute_dtype}, result {policy.output_dtype}",
            file=sys.stderr,
        )
        for sentence in config.without_effect():
            warning = in_options(sentence, TrainingConfig, config.as_dict())
            print(f"warning: {warning}", file=sys.stderr)
    try:
        results = train(config, resume=resume, progress=True, processes=processes, dataset=dataset)
    except (ValueError, OSError, mpgluon.MpgluonError) as error:
        message = in_options(str(error), TrainingConfig, config.as_dict())
        message = message.replace("--pretrained", weights_option)
        print(f"{who}error: {message}", file=sys.stderr)
        processes.end_all(2)
        return 2
    except InterruptedRunError as stop:
        if processes.is_first:
            again = f"stopped by {stop.signal.name}; {_SAME}"
            print(again if resume == "auto" else stop, file=sys.stderr)
        return 128 + int(stop.signal)
    except KeyboardInterrupt:
        kept = checkpoints_of(config.output_path)
        again = _SAME if resume == "auto" else "continue with --resume"
        advice = again if kept else "there is no checkpoint to resume"
        print(f"{who}stopped; {advice}", file=sys.stderr)
        processes.end_all(130)
        return 130
    if not processes.is_first:
        return 0
    of_average = "" if config.ema is None else " of the average"
    print(
        f"test accuracy{of_average} {results['test_accuracy']:.3f} (mean of the classes "
        f"{results['test_accuracy_per_class']:.3f}) on {config.dataset}, "
        f"{counted(results['steps'], 'step')} ({results['skipped_steps']} skipped) in "
        f"{results['training_seconds']:.0f} s, final loss scale "
        f"{results['final_loss_scale']:g}; results in {config.output_dir}"
    )
    if results["skipped_steps"] == results["steps"]:
        print(
            f"warning: every step was skipped, so that the network is as it began; try {advice}, "
            "in another --output-dir",
            file=sys.stderr,
        )
    if results.get("confusions"):  # none on noise
        rows = [(right, answer, str(count)) for right, answer, count in results["confusions"]]
        print(Table(("category", "taken for", "images"), rows).fitted(width()))
    return 0
