"""gpt-oss."""

from miles.hf.families.base import ModelShape
from miles.hf.parallel import ParallelSizes


class GptOssShape(ModelShape):
    """Its experts have biases."""

    model_types = ("gpt_oss",)

    def layout_problems(self, sizes: ParallelSizes) -> list[str]:
        problems = super().layout_problems(sizes)
        if sizes.etp > 1:
            problems.append(
                f"--expert-tensor-parallel-size {sizes.etp} would split experts, which Megatron cannot do where they "
                "have biases; give 1, and share experts out by --expert-model-parallel-size"
            )
        return problems
