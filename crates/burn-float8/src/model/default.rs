//! [`set_default_config`]: configuration of untagged linears.
use burn_backend::tensor::Device;

use crate::backend::Float8Backend;
use crate::config::{Float8Config, Policy, ScalingType};
use crate::error::Float8Error;
use crate::layer::set_default;
use crate::stack::Float8Stack;
use crate::terms::{Operand, Reason};

/// Sets the configuration of untagged linears on this device; `None` turns FP8 off for them.
/// Filters, overrides and statistics do not apply, since an untagged linear has no name. It
/// overrides any earlier rule of the device ([`Untagged`](crate::config::Untagged)).
///
/// # Errors
///
/// As [`Float8LinearConfig::validate`](crate::Float8LinearConfig::validate).
/// [`Float8Error::Config`] for delayed scaling, since an amax history belongs to a layer.
/// [`Float8Error::Setup`] or [`Float8Error::Preflight`] if the device cannot run FP8.
pub fn set_default_config<B: Float8Stack>(
    device: &Device<B>,
    config: Option<&Float8Config>,
) -> Result<(), Float8Error> {
    let policy = match config {
        Some(Float8Config { linear, self_check, .. }) => {
            linear.validate()?;
            let casts = linear.casts();
            if Operand::ALL.into_iter().any(|operand| casts[operand].scaling_type == ScalingType::Delayed) {
                let reason =
                    "a history belongs to a layer: apply the configuration to a model to give its linears names";
                return Err(Float8Error::config("scaling_type", "delayed", reason));
            }
            B::Inner::fp8_prepare(device, Some(*self_check))?;
            Policy::Float8(linear.clone())
        }
        None => Policy::HighPrecision(Reason::Off),
    };
    set_default::<B::Inner>(device, policy);
    Ok(())
}
