"""On-policy distillation: learn from a teacher's probabilities of one's own samples."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.effect import OnlyWith
from miles.config.other_models import shape_differences, unread_weights
from miles.config.paths import ModelFolder
from miles.config.section import Section, rule, warning
from miles.config.values import Values

WITH_OPD = OnlyWith("--use-opd")


class DistillationConfig(Section):
    title: ClassVar[str] = "Distillation"

    use_opd: bool = Field(
        False,
        description="Subtract the KL divergence from a teacher at each token from the advantage. A reward is then "
        "optional.",
    )
    opd_type: Annotated[Literal["sglang", "megatron"] | None, WITH_OPD] = Field(
        None, description="The teacher is a running SGLang server, or is loaded by the trainer beside the model."
    )
    opd_kl_coef: Annotated[float, WITH_OPD] = Field(1.0, gt=0, description="Weight of that divergence.")
    opd_teacher_load: Annotated[ModelFolder | None, WITH_OPD] = Field(
        None, description="Hugging Face folder of a megatron teacher, which has the architecture of --hf-checkpoint."
    )
    opd_teacher_urls: Annotated[list[str] | None, WITH_OPD] = Field(
        None,
        description="Addresses of SGLang servers of one sglang teacher, such as http://10.0.0.7:30000; each request "
        "goes to the least busy of them.",
    )


@rule
def _teacher(v: Values) -> Iterator[str]:
    if not v.use_opd:
        return
    kind, folder, urls = v.opd_type, v.opd_teacher_load, v.opd_teacher_urls
    if kind is None:
        yield "--use-opd needs --opd-type: sglang for a teacher on a server, megatron for one that the trainer loads"
    if kind == "megatron":
        if urls:
            yield "--opd-teacher-urls is for --opd-type sglang, and that is megatron; drop it"
        if folder is None:
            yield "--opd-type megatron needs --opd-teacher-load, the Hugging Face folder of the teacher"
    if kind == "sglang":
        if folder is not None:
            yield f"--opd-teacher-load {folder} is for --opd-type megatron, and that is sglang; drop it"
        if not urls:
            yield "--opd-type sglang needs --opd-teacher-urls, such as http://10.0.0.7:30000"
    for url in urls or []:
        if not url.startswith(("http://", "https://")):
            yield f"--opd-teacher-urls {url} must be the address of a server, such as http://10.0.0.7:30000"
    for url in sorted({url for url in urls or [] if urls.count(url) > 1}):
        yield f"--opd-teacher-urls names {url} more than once; name each server once"


@rule
def _shape_of_the_teacher(v: Values) -> Iterator[str]:
    if v.use_opd and v.opd_teacher_load is not None:
        yield from shape_differences(v, "--opd-teacher-load", v.opd_teacher_load)
        yield from unread_weights("--opd-teacher-load", v.opd_teacher_load)


@warning
def _temperature(v: Values) -> Iterator[str]:
    if v.learns_from_samples and v.use_opd and v.opd_type == "sglang" and v.rollout_temperature != 1:
        yield (
            "--opd-type sglang gives the teacher's log-probabilities at temperature 1, and the student's are at "
            f"--rollout-temperature {v.rollout_temperature}: it is pulled to the teacher at temperature 1"
        )
