//! The checks on wgpu: they pass, every kernel has cases, and memory is poisoned before each case.
//!
//! A software device compiles kernels slower than it runs them, so some cases run only on a GPU. The
//! code of each skipped case is covered by another case. Each test has its own device, whose thread
//! compiles its kernels: kernels that share cases are in one test, and tests run at once.

mod errors;

use std::collections::BTreeSet;
use std::sync::LazyLock;

use cubecl::prelude::*;
use cubecl::wgpu::{
    AutoGraphicsApi, GraphicsApi, RuntimeOptions, WgpuDevice, WgpuRuntime, WgpuSetup, init_device, init_setup,
};
use kernel_tests::{Case, Goldens, Size, poison, visit, visit_goldens};

type Client = ComputeClient<WgpuRuntime>;

/// The machine's default wgpu device. `None` without one.
static SETUP: LazyLock<Option<WgpuSetup>> = LazyLock::new(|| {
    // Type 4 means every adapter. Creating a setup without an adapter panics.
    let has_adapter = !WgpuRuntime::enumerate_devices(4, &AutoGraphicsApi::backend()).is_empty();
    has_adapter.then(|| init_setup::<AutoGraphicsApi>(&WgpuDevice::default(), RuntimeOptions::default()))
});

/// A new device. Without an adapter, the test prints that it is skipped; in CI it fails.
fn client() -> Option<Client> {
    let Some(setup) = &*SETUP else {
        test_data::skip(test_data::VULKAN);
        return None;
    };
    Some(WgpuRuntime::client(&init_device(setup.clone(), RuntimeOptions::default())))
}

/// Every granularity with itself, and with another one.
const PAIRS: &str = "tensorwise,tensorwise|rowwise,rowwise|1x128,1x128|128x128,128x128|1x32,1x32|tensorwise,1x32|rowwise,tensorwise|\
                     1x128,rowwise|128x128,1x128|1x32,128x128";

/// Runs the cases whose names contain all words of a row in any order. There must be at least as
/// many as the row says. `a|b` matches either word.
fn all_pass(rows: &[(&str, usize)]) {
    let Some(client) = client() else { return };
    for (words, least) in rows {
        run(words, *least, |visitor| visit(&client, Size::Small, visitor));
    }
}

fn run(words: &str, least: usize, walk: impl FnOnce(&mut dyn FnMut(Case<'_>))) {
    let mut count = 0;
    walk(&mut |case| {
        let name = case.name.clone();
        if words.split(' ').all(|word| word.split('|').any(|word| name.split(' ').any(|part| part == word))) {
            match case.run() {
                Ok(worst) => assert!((0.0..=1.0).contains(&worst), "{name}: {worst}"),
                Err(failure) => panic!("{name}: {failure}"),
            }
            count += 1;
        }
    });
    assert!(count >= least, "{count} cases of {words}");
}

#[test]
fn names_are_unique() {
    let Some(client) = client() else { return };
    let mut names = BTreeSet::new();
    visit(&client, Size::Full, &mut |case| {
        assert!(names.insert(case.name.clone()), "{} stands for two cases", case.name)
    });
    assert!(names.len() > 5000, "{}", names.len());
}

/// Every kernel for f32, and the kernels of one scale mode for each 16-bit dtype; every shape,
/// layout and content; rows of every length, and more cubes than one dimension of a grid allows;
/// every scale.
#[test]
fn casts() {
    all_pass(&[
        ("quantize 70x300", 144),
        ("quantize 37x140 bf16 F32|E8m0(Rceil)", 30),
        ("quantize 37x140 f16 F32|E8m0(Rceil) Both", 10),
        ("quantize values f32 Both 1x1|3x5|17x33|64x64|1x1000|1000x1|129x257|66x128|128x132", 270),
        (
            "quantize values bf16 Rows|Cols row-major|offset 1x1|3x5|17x33|64x64|1x1000|1000x1|129x257|66x128|128x132",
            180,
        ),
        ("quantize values f16 64x64 row-major|aligned-pitch|gapped", 45),
        ("quantize 35x150", 270),
        ("quantize 139x261 ends", 20),
        ("quantize 6x300 constants", 48),
        ("quantize 140x150|150x140|5x7 strided", 15),
        ("quantize peaks", 81),
        ("quantize strided Both", 42),
        ("scale", 28),
    ]);
}

#[test]
fn codes_and_measures() {
    all_pass(&[
        ("encode", 6),
        ("quantize_with_amax f32 70x133 F32", 72),
        ("quantize_with_amax bf16 PowerOfTwo offset|column-major", 24),
        ("quantize_with_amax 70x128 bf16|f16 e4m3 F32", 12),
        ("quantize_with_amax peak observed", 3),
        ("dequantize_mx", 12),
        ("transpose", 36),
        ("dequantize_to_f32", 60),
        ("amax", 239),
        ("health e4m3", 300),
        ("health e5m2 f32", 24),
    ]);
    let Some(client) = client() else { return };
    let goldens = Goldens::open();
    run("golden_cast|golden_scale|golden_codes|golden_mx", 76, |visitor| visit_goldens(&client, &goldens, visitor));
}

/// Dtypes that the device lacks pass without a launch.
#[test]
fn fused_operations_and_attention() {
    all_pass(&[
        ("swiglu", 12),
        ("rms_norm", 12),
        ("rotary", 4),
        ("adamw", 18),
        ("attention f32", 14),
        ("attention grouped|few f16|bf16", 4),
    ]);
}

/// Tall tiles, for more than 64 rows, see every granularity on either side.
#[test]
fn scaled_gemm() {
    all_pass(&[
        ("scaled_gemm e4m3,e4m3 tensorwise,tensorwise emulated", 90),
        ("scaled_gemm 70x133x200", 28),
        ("scaled_gemm rows alone", 5),
        ("scaled_gemm 1x131x300|2x70x33|3x6x2100|4x9x513", 200),
        ("scaled_gemm 140x6x300|6x140x300 nan-code|nan-scale|zeros", 30),
        ("scaled_gemm 130x137x300 1x128,128x128|1x32,1x32|1x32,rowwise exact|random", 6),
        ("scaled_gemm 2x1x1|5x3x128|2x3x513", 75),
        (&format!("scaled_gemm 70x130x129|129x257x300 {PAIRS}"), 20),
        ("repeated_gemm", 4),
    ]);
}

/// All sizes and contents of e4m3 with tensorwise, rowwise or MX scales; some cases of other scales
/// and formats.
#[test]
fn grouped_gemm() {
    all_pass(&[
        ("grouped_gemm e4m3,e4m3 tensorwise,tensorwise|1x32,1x32|rowwise,rowwise", 300),
        ("grouped_gemm e5m2,e4m3 rowwise,rowwise", 6),
        ("grouped_gemm rowwise,128x128", 10),
        (&format!("grouped_gemm wild {PAIRS}"), 20),
        ("grouped_gemm e4m3,e5m2 rowwise,rowwise|1x32,1x32 emulated", 48),
    ]);
}

/// Memory that a kernel does not write holds NaN, as a fresh allocation after poisoning does.
#[test]
fn memory_is_poisoned() {
    let Some(client) = client() else { return };
    for bytes in [16, 4096, 300_000, 5 << 20] {
        poison(&client, &[bytes; 2]).expect("the device runs");
        let fresh = client.read_one(client.empty(bytes)).expect("the device runs");
        assert!(fresh.iter().all(|&byte| byte == 0xff), "{bytes} bytes");
    }
}
