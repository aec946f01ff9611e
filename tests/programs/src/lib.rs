//! The Rust blocks of `docs/*.md` and the READMEs as doctests: each compiles, and the quick ones
//! run.

pub mod docs;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/quick-start.md")]
mod quick_start {}

#[cfg(doctest)]
#[doc = include_str!("../../../docs/wrap-your-model.md")]
mod wrap_your_model {}

#[cfg(doctest)]
#[doc = include_str!("../../../docs/recipes.md")]
mod recipes {}

#[cfg(doctest)]
#[doc = include_str!("../../../docs/report.md")]
mod report {}

#[cfg(doctest)]
#[doc = include_str!("../../../docs/numerics.md")]
mod numerics {}

#[cfg(doctest)]
#[doc = include_str!("../../../docs/runs.md")]
mod runs {}

#[cfg(doctest)]
#[doc = include_str!("../../../docs/sharding.md")]
mod sharding {}

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}

#[cfg(doctest)]
#[doc = include_str!("../../../crates/burn-float8/README.md")]
mod crate_readme {}

#[cfg(doctest)]
#[doc = include_str!("../../../docs/watch.md")]
mod watch {}
