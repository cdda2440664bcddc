"""State dicts in files: right ones read to the bit, wrong and hostile ones refused."""

import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict

from mpgluon import CheckpointError

import numpy as np
import pytest

from recipes.weights import read_state_dict

# The classes below write the files that torch.save does, byte for byte in the pickle's meaning,
# with the names that PyTorch writes there.


class Named:
    """Pickled as a global name of a module that is not there."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Rebuilt:
    """Pickled as a call of a named function."""

    def __init__(self, function, *args):
        self.function, self.args = function, args


class Storage:
    def __init__(self, key, kind, elements, *part):
        self.pid = ("storage", Named("torch", kind), key, "cpu", elements, *part)


class Writer(pickle._Pickler):  # the one in Python, which can write any name
    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Named):
            self.write(b"c" + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Rebuilt):
            self.save(obj.function)
            self.save(obj.args)
            self.write(b"R")
        else:
            super().save(obj, save_persistent_id)

    def persistent_id(self, obj):
        return obj.pid if isinstance(obj, Storage) else None


REBUILD = Named("torch._utils", "_rebuild_tensor_v2")
PARAMETER = Named("torch._utils", "_rebuild_parameter")


def tensor(key="0", kind="FloatStorage", elements=12, size=(12,), stride=(1,), offset=0):
    storage = Storage(key, kind, elements)
    return Rebuilt(REBUILD, storage, offset, size, stride, False, OrderedDict())


def pickled(content):
    """Return the pickle of a content, which may be a pickle already."""
    if isinstance(content, bytes):
        return content
    buffer = io.BytesIO()
    Writer(buffer, protocol=2).dump(content)
    return buffer.getvalue()


def pth(path, content, storages, *, compression=zipfile.ZIP_STORED, byteorder=b"little"):
    """Write a file as torch.save does, from a pickle's content or its bytes."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled(content))
        archive.writestr("archive/byteorder", byteorder)
        for key, values in storages.items():
            archive.writestr(f"archive/data/{key}", bytes(values))
        archive.writestr("archive/version", b"3\n")
    return path


MAGIC = 0x1950A86A20F9469CFC6C
SIZES = {"short": 2, "int": 4, "long": 4}
THIS_MACHINE = {"protocol_version": 1001, "little_endian": True, "type_sizes": SIZES}


def old_pth(path, content, storages, *, version=1001, system=THIS_MACHINE, keys=None):
    """Write a file as torch.save did before PyTorch 1.6; storages are pairs of length and bytes."""
    keys = list(storages) if keys is None else keys
    data = b"".join(map(pickled, (MAGIC, version, system, content, keys)))
    for elements, values in storages.values():
        data += elements.to_bytes(8, "little") + bytes(values)
    path.write_bytes(data)
    return path


VALUES = np.arange(12, dtype=np.float32) / 3


def assert_refused(path, message):
    with pytest.raises(CheckpointError, match=message):
        read_state_dict(path)


def test_a_pth_file_gives_its_arrays_to_the_bit(tmp_path):
    doubles = np.array([1 + 2.0**-40, 3.0])
    brain = np.array([0x3F80, 0xC040, 0x7F7F], np.uint16)  # 1, -3, the largest bfloat16
    state = OrderedDict(
        plain=tensor(size=(3, 4), stride=(4, 1)),
        transposed=tensor(size=(4, 3), stride=(1, 4)),
        part=tensor(size=(2, 2), stride=(4, 1), offset=5),
        parameter=Rebuilt(PARAMETER, tensor("1", "HalfStorage"), True, OrderedDict()),
        brain=tensor("2", "BFloat16Storage", 3, (3,)),
        double=tensor("3", "DoubleStorage", 2, (2,)),
        count=tensor("4", "LongStorage", 1, (), ()),
        none=tensor(size=(0, 4), stride=(4, 1)),
    )
    halves = VALUES.astype(np.float16)
    arrays = (VALUES, halves, brain, doubles, np.array(2**40))
    storages = {str(key): array.tobytes() for key, array in enumerate(arrays)}
    found = read_state_dict(pth(tmp_path / "w.pth", state, storages))
    table = VALUES.reshape(3, 4)
    for name, expected in {
        "plain": table,
        "transposed": table.T,
        "part": table[1:, 1:3],
        "parameter": halves.astype(np.float32),
        "brain": np.array([1, -3, (2 - 2**-7) * 2.0**127], np.float32),
        "double": np.array([1, 3], np.float32),
        "count": np.array(2**40),
        "none": np.zeros((0, 4), np.float32),
    }.items():
        assert found[name].shape == expected.shape
        assert found[name].dtype == expected.dtype
        assert found[name].tobytes() == expected.tobytes()
    assert list(found) == list(state)


def old(key="0", kind="FloatStorage", elements=12, part=None, rebuild="_rebuild_tensor_v2"):
    storage = Storage(key, kind, elements, part)
    ends = (False, OrderedDict()) if rebuild.endswith("2") else ()
    return Rebuilt(Named("torch._utils", rebuild), storage, 0, (elements,), (1,), *ends)


def test_a_pth_file_of_before_pytorch_1_6_gives_its_arrays_to_the_bit(tmp_path):
    state = OrderedDict(
        half=old("94", "HalfStorage", 12),
        plain=old("72"),
        oldest=old("72", rebuild="_rebuild_tensor"),
        count=old("11", "LongStorage", 1),
    )
    storages = {  # in an order of their own
        "11": (1, np.array(2**40).tobytes()),
        "72": (12, VALUES.tobytes()),
        "94": (12, VALUES.astype(np.float16).tobytes()),
    }
    found = read_state_dict(old_pth(tmp_path / "w.pth", state, storages))
    assert list(found) == list(state)
    assert found["plain"].tobytes() == found["oldest"].tobytes() == VALUES.tobytes()
    assert found["half"].tobytes() == VALUES.astype(np.float16).astype(np.float32).tobytes()
    assert found["count"].tolist() == [2**40]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({part: Rebuilt(Named("posix", "mkdir"), "x")}, "it names posix.mkdir")
            for part in ("version", "system", "keys")
        ),
        ({"content": {"w": Rebuilt(Named("posix", "mkdir"), "x")}}, "it names posix.mkdir"),
        ({"content": {"w": old(), "epoch": 3}}, "content besides named tensors: epoch"),
        ({"content": {"w": old(part=("1", 0, 12))}}, "a storage of unknown kind"),
        ({"content": {"w": old(elements=13)}}, "another length than the 13 elements"),
        ({"content": {"w": old(elements=2**61)}}, "another length"),
        ({"content": {"w": old(), "v": old(kind="LongStorage")}}, "two storages of one key"),
        ({"content": {"w": old("1")}}, "'0'"),
        ({"keys": []}, "'?0"),
        ({"storages": {"0": (12, VALUES.tobytes()[:-4])}}, "is incomplete"),
        ({"version": 1000}, "its version is 1000"),
        ({"system": {**THIS_MACHINE, "little_endian": False}}, "its machine"),
        ({"keys": b"\x80\x02]r\xff\xff\xff\xff."}, "numbers its objects too high"),
    ],
)
def test_other_files_of_before_pytorch_1_6_are_refused(tmp_path, changes, message):
    good = {"content": {"w": old()}, "storages": {"0": (12, VALUES.tobytes())}}
    path = old_pth(tmp_path / "w.pth", **{**good, **changes})
    assert_refused(path, message)
    assert list(tmp_path.iterdir()) == [path]


def test_an_old_file_that_ends_early_and_one_of_another_kind_are_refused(tmp_path):
    path = old_pth(tmp_path / "w.pth", {"w": old()}, {"0": (12, VALUES.tobytes())})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert_refused(path, r"as a state dict|is incomplete, as a download")
    path.write_bytes(content[:-1])
    assert_refused(path, r"is incomplete, as a download .*fetch it again")
    path.write_bytes(b"<html>not found</html>")
    assert_refused(path, "does not begin as PyTorch's files do")


def test_a_safetensors_file_gives_its_arrays_to_the_bit(tmp_path):
    # Written by hand: the length of a header in JSON, the header, the data.
    tensors = {
        "a": ("F32", [3, 4], VALUES),
        "h": ("F16", [12], VALUES.astype(np.float16)),
        "b": ("BF16", [2], np.array([0x3F80, 0xC040], np.uint16)),
        "n": ("I64", [], np.array(7)),
    }
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, values) in tensors.items():
        end = len(data) + values.nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), end]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    arrays = read_state_dict(path)
    assert (arrays["a"] == VALUES.reshape(3, 4)).all()
    assert (arrays["h"] == VALUES.astype(np.float16)).all()
    assert arrays["b"].tolist() == [1, -3]
    assert arrays["n"] == 7
    assert {array.dtype.name for array in arrays.values()} == {"float32", "int64"}


def test_a_pickle_that_would_run_code_runs_none(tmp_path):
    witness = tmp_path / "witness"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(witness),)

    path = pth(tmp_path / "w.pth", pickle.dumps({"w": Hostile()}, protocol=2), {})
    assert_refused(path, r"it names posix\.mkdir, which is not a tensor")
    assert not witness.exists()


NOT_TENSORS = [
    *("builtins eval", "torch load", "torch FloatStorage.from_buffer"),
    *("torch._utils _rebuild_tensor_v2.__globals__", "collections OrderedDict.fromkeys"),
    "torch.nn.modules.conv Conv2d",  # a whole network, saved as an object
]
OUTSIDE = [  # of a storage of 12 numbers: size, stride, offset
    *(((13,), (1,), 0), ((2, 4), (8, 2), 0), ((3, 4), (4, 1), 1)),  # beyond the end
    *(((2,), (-1,), 5), ((2,), (1,), -1)),  # before the beginning
    *(((2**40,), (0,), 0), ((2**62, 2**62), (0, 0), 0)),  # terabytes out of one element
    *(((True,), (1,), 0), ((2.0,), (1,), 0), (("2",), (1,), 0)),
]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            ({"w": Rebuilt(Named(*name.split()), "1")}, "which is not a tensor")
            for name in NOT_TENSORS
        ),
        *(({"w": tensor("0", "FloatStorage", 12, *one)}, "a tensor of size") for one in OUTSIDE),
        ({"w": 3}, "content besides named tensors: w"),
        ({"state_dict": {}, "epoch": 3}, r"state_dict, epoch.*checkpoint\['state_dict'\]"),
        ([1, 2], "all of it"),
        ({3: tensor()}, "named tensors: 3"),
        ({"w": Storage("0", "FloatStorage", 12)}, "named tensors: w"),
        ({"w": tensor("9")}, "no item named 'archive/data/9'"),
        ({"w": tensor("../../x")}, "no item named"),
        ({"w": tensor(elements=2**40)}, "cannot reshape"),
        ({"w": tensor(kind="QInt8Storage")}, "torch.QInt8Storage, which is not"),
        ({"w": Rebuilt(REBUILD, 1, 2)}, "cannot be read"),
        ({"w": Rebuilt(REBUILD, None, 0, (), (), False, None)}, "without a storage"),
        ({"w": Rebuilt("text", 1)}, "not callable"),
        (b"", "ran out|exhausted|Ran out"),
        (b"\x80\x02}q\x00X\xff\xff\xff\x7fab", "expected|truncated"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "numbers its objects too high"),
    ],
)
def test_other_files_than_state_dicts_are_refused(tmp_path, content, message):
    assert_refused(pth(tmp_path / "w.pth", content, {"0": VALUES.tobytes()}), message)


@pytest.mark.parametrize("state", [{"values": "others"}, (None, {"values": "others"})])
@pytest.mark.parametrize("where", ["tensor", "storage", "function", "class"])
def test_a_pickle_cannot_change_what_it_was_given(tmp_path, where, state):
    # BUILD sets attributes of the object that is on the stack.
    build = io.BytesIO()
    writer = Writer(build, protocol=2)
    given = {
        "tensor": tensor(),
        "storage": Storage("0", "FloatStorage", 12),
        "function": REBUILD,
        "class": Named("collections", "OrderedDict"),
    }[where]
    writer.write(b"\x80\x02")
    writer.save(given)
    writer.save(state)
    writer.write(b"b.")
    path = pth(tmp_path / "w.pth", build.getvalue(), {"0": VALUES.tobytes()})
    assert_refused(path, r"cannot be read as a state dict: .*(values|attr|item)")


def test_compressed_files_are_refused_before_they_unfold(tmp_path):
    state = {"w": tensor("0", "FloatStorage", 10**6, (10**6,))}
    storages = {"0": bytes(4 * 10**6)}
    path = pth(tmp_path / "w.pth", state, storages, compression=zipfile.ZIP_DEFLATED)
    assert_refused(path, "are compressed")


def test_a_file_that_lost_or_changed_bytes_gives_right_arrays_or_none(tmp_path):
    state = OrderedDict(w=tensor(size=(3, 4), stride=(4, 1)))
    path = pth(tmp_path / "w.pth", state, {"0": VALUES.tobytes()})
    content = path.read_bytes()
    expected = read_state_dict(path)["w"].tobytes()
    refused = 0
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert_refused(path, path.name)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        path.write_bytes(bytes(damaged))
        try:
            found = read_state_dict(path)
        except CheckpointError:
            refused += 1
        else:  # a byte that says nothing of the content, such as a time
            assert found["w"].tobytes() == expected
    assert refused > len(content) / 3
