//! The checks on wgpu: they pass, every kernel has cases, and memory is poisoned before each case.

use std::collections::BTreeSet;
use std::io::Write;

use checks::{Case, Goldens, Size, poison, visit, visit_goldens};
use cubecl::prelude::*;
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, WgpuDevice, WgpuRuntime};
use float8_kernels::{GemmConfig, GemmPath, Granularity, gemm_path};

/// The machine's default wgpu device. Without one, the test prints that it is skipped; in CI it
/// fails.
fn client() -> Option<ComputeClient<WgpuRuntime>> {
    // Type 4 means every adapter. Creating a client without an adapter panics.
    if WgpuRuntime::enumerate_devices(4, &AutoGraphicsApi::backend()).is_empty() {
        assert!(std::env::var_os("CI").is_none(), "CI must have a wgpu adapter");
        // Not `println!`: the harness captures it while a test passes.
        writeln!(std::io::stdout(), "skipped: no wgpu adapter").expect("standard output is open");
        return None;
    }
    Some(WgpuRuntime::client(&WgpuDevice::default()))
}

/// Every granularity with itself, and with another one.
const PAIRS: &str = "tensorwise,tensorwise|rowwise,rowwise|1x128,1x128|128x128,128x128|1x32,1x32|tensorwise,1x32|rowwise,tensorwise|\
                     1x128,rowwise|128x128,1x128|1x32,128x128";

/// Runs the cases whose names contain all these words in any order. There must be at least `least`
/// of them. `a|b` matches either word.
fn all_pass(words: &str, least: usize) {
    let Some(client) = client() else { return };
    run(words, least, |visitor| visit(&client, Size::Small, visitor));
}

fn run(words: &str, least: usize, walk: impl FnOnce(&mut dyn FnMut(Case<'_>))) {
    let mut names = BTreeSet::new();
    walk(&mut |case| {
        let name = case.name.clone();
        if words.split(' ').all(|word| word.split('|').any(|word| name.split(' ').any(|part| part == word))) {
            match case.run() {
                Ok(worst) => assert!((0.0..=1.0).contains(&worst), "{name}: {worst}"),
                Err(failure) => panic!("{name}: {failure}"),
            }
            assert!(names.insert(name.clone()), "{name} stands for two cases");
        }
    });
    assert!(names.len() >= least, "{} cases of {words}", names.len());
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

#[test]
fn golden_vectors() {
    let Some(client) = client() else { return };
    let goldens = Goldens::open();
    run("golden_cast|golden_scale|golden_codes|golden_mx", 76, |visitor| visit_goldens(&client, &goldens, visitor));
}

/// Every mode in f32, and one case of each 16-bit dtype that the device has.
#[test]
fn attention() {
    all_pass("attention f32", 11);
    all_pass("attention grouped f16|bf16", 2);
}

/// Dtypes that the device lacks pass without a launch.
#[test]
fn adamw() {
    all_pass("adamw", 18);
}

/// Every kernel for f32, and the kernels of one scale mode for each 16-bit dtype.
///
/// A software device compiles kernels slower than it runs them, so some cases here and below run
/// only on a GPU. The code of each skipped case is covered by another case.
#[test]
fn quantize_kernels() {
    all_pass("quantize 70x300", 144);
    all_pass("quantize 37x140 bf16 F32|E8m0(Rceil)", 30);
    all_pass("quantize 37x140 f16 F32|E8m0(Rceil) Both", 10);
}

/// Every shape and layout. Skipped cases use the same kernels with another dtype or orientation.
#[test]
fn quantize_shapes() {
    let shapes = "1x1|3x5|17x33|64x64|1x1000|1000x1|129x257|66x128|128x132";
    all_pass(&format!("quantize values f32 Both {shapes}"), 270);
    all_pass(&format!("quantize values bf16 Rows|Cols row-major|offset {shapes}"), 180);
    all_pass("quantize values f16 64x64 row-major|aligned-pitch|gapped", 45);
}

#[test]
fn quantize_contents() {
    all_pass("quantize 35x150", 270);
    all_pass("quantize 139x261 ends", 20);
    all_pass("quantize 6x300 constants", 48);
    all_pass("quantize 140x150|150x140|5x7 repeated-row|repeated-column|repeated-element", 15);
}

/// Rows of every length, and more cubes than one dimension of a grid allows.
#[test]
fn quantize_peaks() {
    all_pass("quantize peaks", 81);
}

#[test]
fn quantize_views() {
    all_pass("quantize strided Both", 27);
}

#[test]
fn scales_and_codes() {
    all_pass("scale", 28);
    all_pass("encode", 6);
}

#[test]
fn quantize_with_amax() {
    all_pass("quantize_with_amax f32 70x133 F32", 72);
    all_pass("quantize_with_amax bf16 PowerOfTwo offset|column-major", 24);
    all_pass("quantize_with_amax 70x128 bf16|f16 e4m3 F32", 12);
    all_pass("quantize_with_amax peak observed", 3);
}

#[test]
fn dequantize_mx() {
    all_pass("dequantize_mx", 12);
}

#[test]
fn codes_that_serve_both_ways() {
    all_pass("transpose", 38);
    all_pass("dequantize_to_f32", 60);
}

#[test]
fn amax() {
    all_pass("amax", 239);
}

#[test]
fn health() {
    all_pass("health e4m3|literal", 306);
    all_pass("health e5m2 f32", 29);
}

#[test]
fn fused_operations() {
    all_pass("swiglu", 36);
    all_pass("rms_norm", 60);
    all_pass("rotary", 12);
    all_pass("fused refused", 1);
}

#[test]
fn scaled_gemm() {
    all_pass("scaled_gemm e4m3,e4m3 tensorwise,tensorwise", 90);
    all_pass("scaled_gemm 70x133x200", 28);
    all_pass("scaled_gemm rows alone", 5);
    all_pass("scaled_gemm 1x131x300|2x70x33|3x6x2100|4x9x513", 200);
    all_pass("scaled_gemm 140x6x300|6x140x300 nan-code|nan-scale|zeros", 30);
    all_pass("scaled_gemm 130x137x300 1x128,128x128|1x32,1x32|1x32,rowwise exact|random", 6);
}

/// Every pair of granularities, with and without bias. Tall tiles, for more than 64 rows, see every
/// granularity on either side.
#[test]
fn scaled_gemm_scales() {
    all_pass("scaled_gemm 2x1x1|5x3x128|2x3x513", 75);
    all_pass(&format!("scaled_gemm 70x130x129|129x257x300 {PAIRS}"), 20);
}

#[test]
fn scaled_gemm_agreement() {
    all_pass("scaled_gemm options", 1);
    all_pass("scaled_gemm rounded once", 9);
    all_pass("scaled_gemm of casts", 21);
}

/// All sizes and contents of e4m3 with tensorwise, rowwise or MX scales; some cases of other scales
/// and formats.
#[test]
fn grouped_gemm() {
    all_pass("grouped_gemm e4m3,e4m3 tensorwise,tensorwise|1x32,1x32|rowwise,rowwise", 300);
    all_pass("grouped_gemm e5m2,e4m3 rowwise,rowwise", 6);
    all_pass("grouped_gemm rowwise,128x128", 10);
    all_pass(&format!("grouped_gemm wild {PAIRS}"), 20);
    all_pass("grouped_gemm e4m3,e5m2 rowwise,rowwise|1x32,1x32 emulated", 48);
}

#[test]
fn paths_are_reported() {
    let names = [(GemmPath::Emulated, "emulated"), (GemmPath::Gemv, "gemv"), (GemmPath::Mma, "mma")];
    assert!(names.into_iter().all(|(path, name)| path.to_string() == name));
    let Some(client) = client() else { return };
    for granularity in [Granularity::Tensor, Granularity::Block1x128, Granularity::Block1x32] {
        assert_eq!(gemm_path(&client, [granularity; 2], GemmConfig::default()), GemmPath::Emulated);
    }
    assert_eq!(GemmConfig::default(), GemmConfig { use_fast_accum: false, emulate: false });
}

#[test]
fn repeated_gemm() {
    all_pass("repeated_gemm", 4);
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
