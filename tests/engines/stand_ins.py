"""Stand-ins for what SGLang imports but only a CUDA machine has, so that its attention backend can be imported anywhere."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

CUDA_ONLY = ("sgl_kernel", "flash_mla", "flashinfer", "flash_attn", "deep_gemm", "tilelang", "quack", "cutlass")
OTHERS = ("torchvision", "torchaudio", "torchcodec", "mistral_common", "soundfile", "decord", "timm", "av")


class _Name(type):
    """A class that every use at import accepts: called, subclassed, subscripted, as a decorator, with any attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(name)

    def __iter__(cls):
        return iter(())


def _called(self, *args, **kwargs):
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


def _name(name):
    members = {"__init__": lambda self, *args, **kwargs: None, "__call__": _called}
    members |= {"__class_getitem__": classmethod(lambda cls, item: cls), "__getattr__": lambda self, name: _attribute(name)}
    return _Name(name, (), members)


def _attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _name(name)()


class _Module(types.ModuleType):
    __version__ = "0.0.0"
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = _name(name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install(*more):
    """Let `import` find a stand-in for each of the packages that is missing, and for those of `more`."""
    from transformers.utils import import_utils

    # transformers asks once what is there and keeps the answer: it must be the true one
    for name, ask in vars(import_utils).items():
        if name.startswith("is_") and name.endswith("_available"):
            try:
                ask()
            except Exception:
                # some want an argument, and keep nothing
                continue
    sys.meta_path.append(_Finder({name for name in (*CUDA_ONLY, *OTHERS, *more) if importlib.util.find_spec(name) is None}))
