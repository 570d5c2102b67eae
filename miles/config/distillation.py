"""On-policy distillation: learn from a teacher's probabilities of one's own samples."""

from typing import ClassVar, Literal

from pydantic import Field

from miles.config.paths import ModelFolder
from miles.config.section import Section


class DistillationConfig(Section):
    title: ClassVar[str] = "Distillation"

    use_opd: bool = Field(
        False,
        description="Subtract the KL divergence from a teacher at each token from the advantage. A reward is then "
        "optional.",
    )
    opd_type: Literal["sglang", "megatron"] | None = Field(
        None, description="The teacher is a running SGLang server, or is loaded by the trainer beside the model."
    )
    opd_kl_coef: float = Field(1.0, gt=0, description="Weight of that divergence.")
    opd_teacher_load: ModelFolder | None = Field(
        None, description="Hugging Face folder of a megatron teacher, which has the architecture of --hf-checkpoint."
    )
    opd_teacher_urls: list[str] | None = Field(
        None,
        description="Addresses of SGLang servers of one sglang teacher, such as http://10.0.0.7:30000; each request "
        "goes to the least busy of them.",
    )
