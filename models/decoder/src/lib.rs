//! Parts shared by decoder-only transformers, with Hugging Face's names: a model is its layers and
//! [`Parts`], which runs them.
//!
//! ```text
//! h ← embed(tokens)
//! h ← layer(h)                       per layer
//! logits = lm_head(rmsnorm(h))
//! ```
//! Hidden states are `[B·T, H]` matrices in the compute dtype; norms, softmax, logits and the loss
//! are in f32.

pub mod attention;
mod cache;
mod dims;
mod e4m3;
mod forward;
pub mod hf;
mod linear;
mod memory;
mod mlp;
mod norm;
pub mod rope;
mod section;

pub use attention::{Attention, Positions};
pub use cache::{KvCache, LayerCache};
pub use dims::{Dimensions, MoeConfig, positive, refused};
pub use forward::{Layer, Parts, Pass};
pub use linear::{INITIALIZER, linear};
pub use mlp::Mlp;
pub use norm::{norm, rms_norm};
#[doc(hidden)]
pub use section::set;
