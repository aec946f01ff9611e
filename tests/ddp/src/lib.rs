//! Test of burn-train's data-parallel strategy. A crate of its own: Burn's feature `distributed` asks more of
//! a backend than generic tests do.
