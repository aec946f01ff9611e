//! Operations on a model: apply a configuration, switch FP8 on and off, read the report, save and
//! restore the state.
mod apply;
mod batch_invariance;
mod default;
mod fp8_only;
mod lora;
mod monitor;
mod report;
mod schedule;
mod state;
mod state_module;
mod switch;
mod table;
pub(crate) mod walk;

pub use apply::Summary;
pub use batch_invariance::independent_rows;
pub use default::set_default_config;
pub use fp8_only::{
    Fp8Only, check_frozen, fp8_only, linear_infos, load_codes, part_of_codes, read_codes, weight_of_codes,
};
pub use lora::{Lora, LoraAdapter, LoraConfig};
pub use monitor::{Amaxes, Monitor, NonFiniteOperand, SampledOperand};
pub use report::{GemmReport, LayerReport, OperandReport, Report, report};
pub use schedule::{PrecisionSchedule, Span};
pub use state::{Float8State, LayerState, begin_float8_step};
pub use state_module::Float8StateModule;
pub use switch::{set_float8_enabled, without_float8};
