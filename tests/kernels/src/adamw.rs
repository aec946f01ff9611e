//! AdamW against its definition, in every dtype that a device stores.

use cubecl::prelude::*;
use float8_kernels::check::{AdamWVariant, Variant};

use crate::case::{Cases, wrong};
use crate::data::{DTYPES, F32};

pub(crate) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for param in DTYPES {
        for moments in DTYPES {
            for rounded in [[false; 2], [true; 2]] {
                let grad = if moments == F32 { F32 } else { param };
                let variant = AdamWVariant { param, moments, grad, rounded };
                let name = format!("adamw {param} {moments}{}", if rounded[0] { " rounded" } else { "" });
                all.add(name, move |client| {
                    if !variant.is_supported(client) {
                        return Ok(0.0);
                    }
                    match Variant::AdamW(variant).judge(client, 5) {
                        Ok(()) => Ok(0.0),
                        Err(flaw) => Err(wrong!("{flaw}")),
                    }
                });
            }
        }
    }
}
