"""The names of the library: docs/library.md."""

from .base.errors import RunError as RunError
from .catalog.recipes import Recipe as Recipe
from .config import Config as Config
from .config import OptimizerConfig as OptimizerConfig
from .config import load_config as load_config
from .config.job import Job as Job
from .config.job import build_job as build_job
from .data.tokenizer import build_tokenizer as build_tokenizer
from .float8.convert import convert_to_float8 as convert_to_float8
from .float8.scaled_linear import swap_linears as swap_linears
from .metrics.base_writer import Writer as Writer
from .metrics.base_writer import WrittenRun as WrittenRun
from .metrics.flops import FlopsLedger as FlopsLedger
from .metrics.flops import compute_rates as compute_rates
from .metrics.flops import count_flops as count_flops
from .metrics.hardware import find_peaks as find_peaks
from .metrics.processor import StepValues as StepValues
from .models.generate import Sampling as Sampling
from .models.llama3 import Transformer as Transformer
from .planner.plan import find_device as find_device
from .planner.plan import plan as plan
from .planner.prepare import prepare_job as prepare_job
from .run.process_group import init_distributed as init_distributed
from .tools.generate import generate as generate
from .train import run_training as run_training
from .training.trainer import Trainer as Trainer

__version__: str
