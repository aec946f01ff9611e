//! The checks themselves on wgpu: they pass, each kernel's among them, and memory is poisoned before them.

use std::collections::BTreeSet;
use std::io::Write;

use checks::{Case, Goldens, Size, poison, visit, visit_goldens};
use cubecl::prelude::*;
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, WgpuDevice, WgpuRuntime};

/// The machine's default wgpu device. Without one the test says that it is skipped, and fails in CI.
fn client() -> Option<ComputeClient<WgpuRuntime>> {
    // Type 4 is every adapter. Asking for a client without one panics.
    if WgpuRuntime::enumerate_devices(4, &AutoGraphicsApi::backend()).is_empty() {
        assert!(std::env::var_os("CI").is_none(), "CI must have a wgpu adapter");
        // Not `println!`, which the harness holds back while a test passes.
        writeln!(std::io::stdout(), "skipped: no wgpu adapter").expect("standard output is open");
        return None;
    }
    Some(WgpuRuntime::client(&WgpuDevice::default()))
}

fn all_pass(only: &str, least: usize) {
    let Some(client) = client() else { return };
    run(only, least, |visitor| visit(&client, Size::Small, visitor));
}

/// Runs cases whose names contain `only`, of which there must be `least`.
fn run(only: &str, least: usize, walk: impl FnOnce(&mut dyn FnMut(Case<'_>))) {
    let mut names = BTreeSet::new();
    walk(&mut |case| {
        let name = case.name.clone();
        if name.contains(only) {
            match case.run() {
                Ok(worst) => assert!((0.0..=1.0).contains(&worst), "{name}: {worst}"),
                Err(failure) => panic!("{name}: {failure}"),
            }
            assert!(names.insert(name.clone()), "{name} stands for two cases");
        }
    });
    assert!(names.len() >= least, "{} cases", names.len());
}

#[test]
fn golden_vectors() {
    let Some(client) = client() else { return };
    let goldens = Goldens::open();
    run("golden_", 44, |visitor| visit_goldens(&client, &goldens, visitor));
}

/// A part of the casts: a software device compiles kernels slower than it runs them, and the crate of the kernels has tests
/// of its own there.
#[test]
fn quantize() {
    all_pass("quantize 37x140 bf16 row-major values e4m3", 24);
    all_pass("quantize 70x133 f16 gapped", 4);
    all_pass("quantize 35x150 bf16 row-major spiced", 8);
    all_pass("quantize 1000x1 ", 5);
    all_pass("quantize 129x257 bf16 row-major values e4m3 1x32", 1);
}

#[test]
fn quantize_with_amax() {
    all_pass("quantize_with_amax 70x133 f32 column-major", 8);
    all_pass("quantize_with_amax 70x133 bf16 offset", 8);
}

#[test]
fn dequantize_mx() {
    all_pass("dequantize_mx", 12);
}

#[test]
fn amax() {
    all_pass("amax 37x140", 24);
}

#[test]
fn health() {
    all_pass("health 70x133 f32 pitched", 4);
    all_pass("health 37x140 bf16 row-major one-", 8);
}

#[test]
fn scaled_gemm() {
    all_pass("e4m3,e4m3 tensorwise,tensorwise", 30);
    all_pass("1x128,128x128", 2);
    all_pass("1x32,1x32", 2);
    all_pass("1x32,rowwise", 4);
    all_pass("inf-code", 4);
    all_pass("nan-scale", 8);
}

/// All sizes and contents where scales are a tensor's or MX; of other scales and formats a part.
#[test]
fn grouped_gemm() {
    all_pass("e4m3 tensorwise by e4m3 tensorwise", 100);
    all_pass("e4m3 1x32 by e4m3 1x32", 70);
    all_pass("e5m2 rowwise by e4m3 rowwise", 6);
    all_pass("rowwise by e4m3 128x128", 10);
    all_pass("wild 204x40x96 e4m3 1x32", 5);
}

#[test]
fn repeated_gemm() {
    all_pass("repeated_gemm", 4);
}

/// Memory that a kernel would not write holds NaN: the allocation after poisoning does.
#[test]
fn memory_is_poisoned() {
    let Some(client) = client() else { return };
    for bytes in [16, 4096, 300_000, 5 << 20] {
        poison(&client, &[bytes; 2]).expect("the device runs");
        let fresh = client.read_one(client.empty(bytes)).expect("the device runs");
        assert!(fresh.iter().all(|&byte| byte == 0xff), "{bytes} bytes");
    }
}
