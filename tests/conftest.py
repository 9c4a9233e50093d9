"Set before anything imports torch or triton: one thread, and Triton's interpreter where there is no GPU."
import os, shutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")   # no pool of compiling processes: on two loaded cores a library was opened half written
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if shutil.which("nvidia-smi") is None: os.environ.setdefault("TRITON_INTERPRET", "1")
