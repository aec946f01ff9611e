//! Peak bytes of one train step of the debug Llama on the CPU, over what was alive before it.
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::backend::{Autodiff, Flex};
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn_float8::{Float8, Float8Config, Float8LinearConfig, Recipe, set_default_config};
use llama3::Llama;
use serde::Serialize;

use crate::model::{Training, float8, plain};

/// The system's allocator, counting.
pub struct Counting;

static ALIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    let alive = ALIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(alive, Relaxed);
}

// SAFETY: every call is the system allocator's; counting touches no memory of the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        ALIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// One precision.
#[derive(Serialize)]
pub struct Row {
    precision: &'static str,
    /// Of hidden states.
    dtype: &'static str,
    peak_bytes: usize,
    /// To f32 on the plain backend.
    ratio: f64,
}

fn peak<B: AutodiffBackend>(model: Llama<B>) -> usize {
    let mut training = Training::new(model);
    // Makes the moments, which stay.
    training.step();
    let before = ALIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    training.step();
    PEAK.load(Relaxed) - before
}

pub fn rows() -> Vec<Row> {
    type Fp8 = Autodiff<Float8<Flex>>;
    let device = Default::default();
    let mut peaks = vec![("plain", "f32", peak(plain::<Autodiff<Flex>>()))];
    // bf16 hidden states beside f32 parameters take linears that mix dtypes: the decorator with FP8 off.
    let off = set_default_config::<Fp8>(&device, None);
    off.expect("off is possible everywhere");
    peaks.push(("plain", "bf16", peak(plain::<Fp8>().with_compute_dtype(DType::BF16))));
    let on = set_default_config::<Fp8>(&device, Some(&Float8Config::default()));
    on.expect("the default recipe needs no layers");
    let recompute = Float8LinearConfig::new(Recipe::Tensorwise).with_force_recompute_fp8_weight_in_bwd(true);
    for (dtype, compute) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let model = || float8::<Fp8>(Float8Config::tensorwise()).with_compute_dtype(compute);
        peaks.push(("tensorwise", dtype, peak(model())));
        peaks.push(("tensorwise, saved operands", dtype, peak(model().with_saved_fp8_operands())));
        let model = float8::<Fp8>(recompute.clone().into()).with_compute_dtype(compute).with_saved_fp8_operands();
        peaks.push(("the same, weights recast", dtype, peak(model)));
    }
    let plain = peaks[0].2 as f64;
    let row = |(precision, dtype, peak_bytes)| Row { precision, dtype, peak_bytes, ratio: peak_bytes as f64 / plain };
    peaks.into_iter().map(row).collect()
}

pub fn print(rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    println!(
        "\npeak memory of a train step of the debug Llama on the CPU, 8 x 128 tokens, over what is alive before it"
    );
    println!("{:<28}  {:>5}  {:>8}  {:>6}", "precision", "dtype", "MiB", "ratio");
    for Row { precision, dtype, peak_bytes, ratio } in rows {
        let mib = *peak_bytes as f64 / f64::from(1 << 20);
        println!("{precision:<28}  {dtype:>5}  {mib:>8.2}  {ratio:>6.2}");
    }
}
