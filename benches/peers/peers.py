"""The peers, each in a process of its own: `python3 peers.py NAME FILE DEVICE`. It loads once as a warm-up, verifies that,
says so on stdout as JSON, and then loads the file again for each line on stdin."""

import json
import os
import sys
import time

NAMES = ["kvikio", "kvikio_16", "safetensors", "safetensors_prefetch", "fastsafetensors", "instanttensor", "runai",
         "flashpack"]


def tensors_of(path):
    """Where the file's bytes are: name -> (begin, end)."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: tuple(8 + length + at for at in entry["data_offsets"]) for name, entry in header.items()}


def make(name, path, device):
    """A function that loads the file and returns name -> tensor on the device, and what has to be done before each."""
    import torch
    cuda = f"cuda:{device}"
    torch.empty(1, device=cuda)
    if name.startswith("kvikio"):
        import cupy
        import kvikio
        import kvikio.defaults
        if name == "kvikio_16":
            kvikio.defaults.set("num_threads", 16)
        size = os.stat(path).st_size

        def load():
            whole = cupy.empty(size, dtype=cupy.uint8)
            with kvikio.CuFile(path, "r") as file:
                if file.read(whole) != size:
                    raise RuntimeError("a short read")
            cupy.cuda.Device(device).synchronize()
            whole = torch.from_dlpack(whole)
            return {key: whole[begin:end] for key, (begin, end) in tensors_of(path).items()}
        return load
    if name == "safetensors":
        from safetensors.torch import load_file
        return lambda: load_file(path, device=cuda)
    if name == "safetensors_prefetch":
        from safetensors import safe_open

        def load():
            with safe_open(path, framework="pt", device=cuda) as file:
                with file.prefetch(threads=16) as loader:
                    return dict(loader)
        if not hasattr(safe_open, "prefetch"):
            raise ImportError("this version of safetensors has no prefetch")
        return load
    if name == "fastsafetensors":
        from fastsafetensors import SafeTensorsFileLoader

        def load():
            loader = SafeTensorsFileLoader(None, cuda, nogds=True)
            loader.add_filenames({0: [path]})
            buffers = loader.copy_files_to_device()
            found = {key: buffers.get_tensor(key) for key in loader.get_keys()}
            found["keep"] = (loader, buffers)
            return found
        return load
    if name == "instanttensor":
        from instanttensor import safe_open as instant

        def load():
            with instant(path, framework="pt", device=device) as file:
                return dict(file.tensors())
        return load
    if name == "runai":
        from runai_model_streamer import SafetensorsStreamer

        def load():
            with SafetensorsStreamer() as streamer:
                streamer.stream_file(path, device=cuda)
                return {key: tensor.to(cuda) for key, tensor in streamer.get_tensors()}
        return load
    if name == "flashpack":
        from flashpack.deserialization import read_flashpack_file
        from flashpack.serialization import pack_to_file
        from safetensors.torch import load_file
        packed = path + ".flashpack"
        if not os.path.exists(packed):
            pack_to_file(load_file(path), packed, None)
        return lambda: {"keep": read_flashpack_file(packed, device=cuda)}
    raise ValueError(name)


def verify(path, found):
    """Compares the bytes on the device with the file's; flashpack's own format has no tensors by name here."""
    import torch
    named = [key for key in found if key != "keep"]
    with open(path, "rb") as file:
        for key in named:
            begin, end = tensors_of(path)[key]
            file.seek(begin)
            wanted = torch.frombuffer(bytearray(file.read(end - begin)), dtype=torch.uint8)
            there = found[key].reshape(-1).view(torch.uint8)
            if not torch.equal(there, wanted.to(there.device)):
                raise RuntimeError(f"{key}: other bytes")
    return len(named)


def main():
    name, path, device = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**words):
        answers.write(json.dumps(words) + "\n")

    try:
        import torch
        load = make(name, path, device)
        found = load()
        torch.cuda.synchronize()
        say(ready=True, verified=verify(path, found))
    except ImportError as why:
        return say(missing=str(why))
    except Exception as why:  # whatever a peer throws is a result
        return say(failed=f"{type(why).__name__}: {why}"[:300])
    for _ in sys.stdin:
        found = None
        torch.cuda.synchronize()
        try:
            begun = time.perf_counter()
            found = load()
            torch.cuda.synchronize()
            say(seconds=time.perf_counter() - begun)
        except Exception as why:
            return say(failed=f"{type(why).__name__}: {why}"[:300])


if __name__ == "__main__":
    main()
