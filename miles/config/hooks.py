"""Functions of the user's own, by dotted path; docs/user-guide/customisation.md has an example of each."""

from typing import Annotated, ClassVar

from pydantic import Field

from miles.config.effect import EVALUATES, NO_SAMPLES, NotWith
from miles.config.paths import FunctionPath
from miles.config.section import Section


class HooksConfig(Section):
    title: ClassVar[str] = "Functions of your own"

    rollout_function_path: FunctionPath | None = Field(
        None,
        description="Makes a whole rollout: (config, rollout_id, data_source, evaluation=False), for a "
        "RolloutFnTrainOutput.",
    )
    eval_function_path: Annotated[FunctionPath | None, EVALUATES] = Field(
        None,
        description="Makes an evaluation: as --rollout-function-path, with evaluation=True, for a RolloutFnEvalOutput.",
    )
    custom_generate_function_path: Annotated[FunctionPath | None, NO_SAMPLES] = Field(
        None, description="Generates a sample: async (config, sample, sampling_params), for a Sample or several."
    )
    custom_reward_post_process_path: Annotated[FunctionPath | None, NO_SAMPLES] = Field(
        None,
        description="Makes the rewards that are trained with: (config, samples), for the raw and the shaped ones.",
    )
    custom_convert_samples_to_train_data_path: FunctionPath | None = Field(
        None,
        description="Makes the training data: (config, samples), for a dict of lists with an entry a sample; see "
        "docs/user-guide/customisation.md.",
    )
    data_source_path: FunctionPath | None = Field(
        None,
        description="Class of the prompts, derived from miles.rollout.data_source.DataSource, in place of "
        "RolloutDataSource; --prompt-data is not needed then.",
    )
    rollout_sample_filter_path: FunctionPath | None = Field(
        None, description="Sees the groups that are trained on, (config, groups), and may set remove_sample."
    )
    rollout_all_samples_process_path: FunctionPath | None = Field(
        None, description="Sees all finished groups of a rollout, filtered ones too: (config, groups, data_source)."
    )
    custom_rollout_log_function_path: FunctionPath | None = Field(
        None,
        description="Sees a rollout's samples and metrics: (rollout_id, config, samples, metrics, seconds); returning "
        "True leaves out Miles' own metrics.",
    )
    custom_eval_rollout_log_function_path: Annotated[FunctionPath | None, EVALUATES] = Field(
        None, description="Sees an evaluation: (rollout_id, config, data, metrics); True leaves out Miles' own metrics."
    )
    rollout_data_postprocess_path: Annotated[
        FunctionPath | None, NotWith("--loss-type sft_loss or --debug-rollout-only", "which have no advantages")
    ] = Field(
        None,
        description="Sees a rank's batch in the trainer once its advantages are known: (config, rollout_id, batch, "
        "columns).",
    )
