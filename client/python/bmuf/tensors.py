"""A model as the wire sees it: one flat float32 vector and some raw bytes, in manifest order."""

import numpy as np

from bmuf.errors import Error
from bmuf.v1 import types_pb2

_DTYPES = {
    "float32": types_pb2.DTYPE_F32,
    "float16": types_pb2.DTYPE_F16,
    "bfloat16": types_pb2.DTYPE_BF16,
    "int32": types_pb2.DTYPE_I32,
    "int64": types_pb2.DTYPE_I64,
}
_ROLES = {
    "bmuf": types_pb2.TENSOR_ROLE_BMUF,
    "mean": types_pb2.TENSOR_ROLE_MEAN,
    "max": types_pb2.TENSOR_ROLE_MAX,
    "first": types_pb2.TENSOR_ROLE_FIRST,
    "local": types_pb2.TENSOR_ROLE_LOCAL,
}


class _Numpy:
    """A writable numpy array."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape
        self.dtype = str(array.dtype)

    def read(self):
        return np.ascontiguousarray(self.array)

    def write(self, values):
        self.array[...] = values.reshape(self.shape)


class _Torch:
    """A torch tensor on any device; float16 and bfloat16 are exchanged as float32."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = str(tensor.dtype).rpartition(".")[2]

    def read(self):
        import torch

        tensor = self.tensor.detach()
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()
        return tensor.cpu().contiguous().numpy()

    def write(self, values):
        import torch

        with torch.no_grad():
            self.tensor.copy_(torch.from_numpy(values.reshape(self.shape)))


class Tensors:
    """The tensors of a model with their roles.

    model: a torch.nn.Module (parameters get role "bmuf", floating buffers "mean", integer buffers "max"), or a mapping
    name -> numpy array (role "bmuf"). roles: overrides, name -> "bmuf" | "mean" | "max" | "first" | "local".
    """

    def __init__(self, model, roles=None):
        roles = dict(roles or {})
        entries = []
        if hasattr(model, "named_parameters"):
            entries += [(n, _Torch(p), "bmuf") for n, p in model.named_parameters()]
            entries += [(n, _Torch(b), "mean" if b.is_floating_point() else "max") for n, b in model.named_buffers()]
        else:
            entries += [(n, _Numpy(a), "bmuf") for n, a in model.items()]
        unknown = set(roles) - {name for name, _, _ in entries}
        if unknown:
            raise Error("INVALID_ARGUMENT", f"roles names tensors the model does not have: {sorted(unknown)}")
        self.manifest = types_pb2.Manifest()
        self._bmuf, self._auxiliary = [], []
        for name, tensor, role in entries:
            role = roles.get(name, role)
            if role not in _ROLES or tensor.dtype not in _DTYPES:
                raise Error("INVALID_ARGUMENT", f"tensor {name}: role {role!r} with dtype {tensor.dtype} is not possible")
            self.manifest.tensors.add(name=name, shape=tensor.shape, dtype=_DTYPES[tensor.dtype], role=_ROLES[role])
            if role == "bmuf":
                self._bmuf.append(tensor)
            elif role != "local":
                self._auxiliary.append(tensor)

    def read(self):
        """(flat float32 vector of the bmuf tensors, bytes of the others)."""
        flat = [t.read().reshape(-1).astype(np.float32, copy=False) for t in self._bmuf]
        return (np.concatenate(flat) if flat else np.zeros(0, np.float32)), b"".join(t.read().tobytes() for t in self._auxiliary)

    def write(self, flat, auxiliary):
        """Loads what read() returns, in place."""
        at = 0
        for tensor in self._bmuf:
            size = int(np.prod(tensor.shape, dtype=np.int64))
            tensor.write(flat[at : at + size])
            at += size
        at = 0
        for tensor in self._auxiliary:
            size = int(np.prod(tensor.shape, dtype=np.int64))
            values = np.frombuffer(auxiliary, tensor.dtype, size, at).copy()
            tensor.write(values)
            at += values.nbytes
