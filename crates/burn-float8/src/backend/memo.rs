//! What a device answered once: neither its dtypes nor its kernels change, and asking takes a lock of the whole process.
use std::any::TypeId;
use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hash;
use std::thread::LocalKey;

use burn_backend::tensor::Device;
use burn_backend::{DeviceId, DeviceOps};
use float8_kernels::{GEMV_ROWS, GemmConfig, GemmPath, Granularity, disabled_count};

use super::{DeviceFacts, Float8Backend};

type Memo<Q, A> = RefCell<HashMap<(TypeId, DeviceId, Q), A>>;

thread_local! {
    static FACTS: Memo<(), DeviceFacts> = RefCell::default();
    static PATHS: Memo<(Option<usize>, [Granularity; 2], GemmConfig, u64), GemmPath> = RefCell::default();
}

fn ask<B: Float8Backend, Q: Copy + Eq + Hash, A: Copy>(
    memo: &'static LocalKey<Memo<Q, A>>,
    device: &Device<B>,
    question: Q,
    answer: impl FnOnce() -> A,
) -> A {
    let key = (TypeId::of::<B>(), device.id(), question);
    if let Some(known) = memo.with_borrow(|memo| memo.get(&key).copied()) {
        return known;
    }
    let answer = answer();
    memo.with_borrow_mut(|memo| memo.insert(key, answer));
    answer
}

/// [`Float8Backend::fp8_facts`].
///
/// # Panics
///
/// If the device cannot run FP8.
pub(crate) fn facts<B: Float8Backend>(device: &Device<B>) -> DeviceFacts {
    ask::<B, _, _>(&FACTS, device, (), || {
        // The first use on this device of a program that has applied no configuration.
        B::fp8_prepare(device, None).unwrap_or_else(|error| panic!("{}", error));
        B::fp8_facts(device)
    })
}

/// [`Float8Backend::fp8_gemm_path`].
pub(crate) fn gemm_path<B: Float8Backend>(
    device: &Device<B>,
    rows: Option<usize>,
    granularities: [Granularity; 2],
    config: GemmConfig,
) -> GemmPath {
    // Of more rows, one answer.
    let rows = rows.map(|rows| rows.min(GEMV_ROWS + 1));
    let path = || B::fp8_gemm_path(device, rows, granularities, config);
    // A disabled kernel changes the answer.
    ask::<B, _, _>(&PATHS, device, (rows, granularities, config, disabled_count()), path)
}
