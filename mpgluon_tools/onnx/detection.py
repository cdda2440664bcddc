"""MXNet's operators of images and boxes in ONNX: resizing, decoding, non-maximum suppression."""

from __future__ import annotations

from math import inf

from mpgluon_tools.leaving.refusal import require
from mpgluon_tools.onnx.calls import OperatorCall, Translation

import numpy as np

__all__ = ["DETECTION"]


def _up_sampling(call: OperatorCall) -> str:
    scale, data = int(call.options["scale"]), call.inputs[0]
    if call.options["sample_type"] == "bilinear":  # a transposed convolution with a weight
        return call.node("ConvTranspose", kernel_shape=[2 * scale - scale % 2] * 2, group=int(
            call.options["num_filter"]), strides=[scale] * 2, pads=[scale // 2] * 4)  # fmt: skip
    require(len(call.inputs) == 1, "it has several operands")
    sizes = call.step("Mul", call.step("Shape", data), [1, 1, scale, scale])
    return _resized(call, sizes, "asymmetric", mode="nearest", nearest_mode="floor")


def _bilinear(call: OperatorCall) -> str:
    """Translate a BilinearResize2D to the size that MXNet has inferred."""
    require(call.larger_shape[2:] == call.output_shape[2:], "its size is open")
    batch = call.step("Gather", call.step("Shape", call.inputs[0]), [0, 1])
    sizes = call.step("Concat", batch, call.output_shape[2:], axis=0)
    corners = call.option("align_corners", True)
    return _resized(call, sizes, "align_corners" if corners else "half_pixel", mode="linear")


def _resized(call: OperatorCall, sizes: str, places: str, **attributes: str) -> str:
    attributes["coordinate_transformation_mode"] = places
    return call.node("Resize", call.inputs[0], "", "", sizes, **attributes)


def _box_decode(call: OperatorCall) -> str:
    """Translate a box_decode: offsets from anchors become corners."""
    shift, growth, middle, size = (
        call.step("Gather", one, pair, axis=-1) for one in call.inputs for pair in ([0, 1], [2, 3])
    )
    scales = np.array([float(call.option(f"std{n}", 1)) for n in range(4)]).reshape(2, 2)
    if call.option("format", "center") == "corner":
        size = call.step("Sub", size, middle)
        middle = call.step("Add", middle, call.step("Mul", size, 0.5))
    shift, growth = (call.step("Mul", one, scale) for one, scale in zip((shift, growth), scales))
    middle = call.step("Add", call.step("Mul", shift, size), middle)
    if float(call.option("clip", -1)) > 0:
        growth = call.step("Min", growth, float(call.option("clip")))
    reach = call.step("Mul", call.step("Mul", call.step("Exp", growth), size), 0.5)
    ends = (call.step(operator, middle, reach) for operator in ("Sub", "Add"))
    return call.node("Concat", *ends, axis=-1)


def _box_nms(call: OperatorCall) -> str:
    """Translate a box_nms: rows that are kept by descending score, then rows of -1.

    The ``topk`` best valid rows take part; NonMaxSuppression compares the rows of each class. Its
    result, a list of places, becomes scores, by which the rows are sorted again.
    """
    require(call.rank == 3, f"its boxes have {call.rank} axes, not 3")
    form, first = call.option("in_format", "corner"), call.option("coord_start", 2)
    require(call.option("out_format", "corner") == form, "it changes the format of boxes")
    group, rows, data = call.option("id_index", -1), call.size(1), call.inputs[0]
    threshold, count = float(call.option("valid_thresh", 0)), call.option("topk", -1)
    count = rows if count < 0 else min(count, rows)

    def column(place: int) -> str:
        return call.step("Gather", data, place, axis=2)

    def sorted_by(scores: str) -> tuple[str, str]:
        scores, places = call.several("TopK", 2, scores, [count], axis=1)
        places = call.step("Expand", call.step("Unsqueeze", places, [2]), [1, 1, call.size(2)])
        return scores, call.step("GatherElements", data, places, axis=1)

    scores = column(call.option("score_index", 1))
    valid = call.step("Greater", scores, threshold)
    if group >= 0:
        background = float(call.option("background_id", -1))
        other = call.step("Not", call.step("Equal", column(group), background))
        valid = call.step("And", valid, other)
    scores, data = sorted_by(call.step("Where", valid, scores, -inf))
    each = call.step("Unsqueeze", scores, [1])  # batch, class, row
    if group >= 0 and not call.option("force_suppress", False):
        classes = column(group)
        lowest, highest = (call.step(f"Reduce{end}", classes, keepdims=0) for end in ("Min", "Max"))
        numbers = call.step("Range", lowest, call.step("Add", highest, 1.0), 1.0)
        across = call.step("Unsqueeze", numbers, [0, 2])
        same = call.step("Equal", call.step("Unsqueeze", classes, [1]), across)
        each = call.step("Where", same, each, -inf)
    boxes = call.step("Gather", data, list(range(first, first + 4)), axis=2)
    limits = [count], np.array([float(call.option("overlap_thresh", 0.5))]), np.array([threshold])
    centre = int(form == "center")
    chosen = call.step("NonMaxSuppression", boxes, each, *limits, center_point_box=centre)
    places = call.step("Gather", chosen, [0, 2], axis=1)
    none = call.step("Expand", -inf, call.step("Shape", scores))
    kept = call.step("ScatterND", none, places, call.step("GatherND", scores, places))
    scores, data = sorted_by(kept)
    there = call.step("Greater", call.step("Unsqueeze", scores, [2]), -inf)
    result = call.step("Where", there, data, -1.0)
    return call.node("Pad", result, [0, 0, 0, 0, rows - count, 0], -1.0)


def _roi_align(call: OperatorCall) -> str:
    """Translate a ROIAlign: means of bilinear samples in parts of boxes."""
    require(not call.option("position_sensitive", False), "position_sensitive")
    boxes = call.step("Gather", call.inputs[1], [1, 2, 3, 4], axis=1)
    numbers = call.step("Gather", call.inputs[1], np.array(0), axis=1)
    aligned = "half_pixel" if call.option("aligned", False) else "output_half_pixel"
    rows, columns = call.options["pooled_size"]
    return call.node(
        "RoiAlign", call.inputs[0], boxes, call.cut(numbers), mode="avg", output_height=rows,
        output_width=columns, sampling_ratio=max(call.option("sample_ratio", -1), 0),
        spatial_scale=float(call.options["spatial_scale"]), coordinate_transformation_mode=aligned,
    )  # fmt: skip


DETECTION: dict[str, Translation] = {
    "UpSampling": _up_sampling, "_contrib_BilinearResize2D": _bilinear,
    "_contrib_box_decode": _box_decode, "_contrib_box_nms": _box_nms,
    "_contrib_ROIAlign": _roi_align,
}  # fmt: skip
"""Operators of images and boxes."""
