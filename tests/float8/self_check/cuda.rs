//! CUDA offline with injected faults, interpreted. Each test has its own device, identified by its
//! number of SMs.
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Flex;
use burn::tensor::DType;
use burn::tensor::ops::AttentionModuleOptions;
use burn_cubecl::CubeBackend;
use burn_float8::backend::Float8Backend;
use burn_float8::{Float8Config, Float8Error, Monitor, Recipe, Report, nn, report};
use burn_fusion::Fusion;
use codegen::device::{Execution, GenerateCuda, OfflineDevice, Running, execute, take_waits};
use codegen::fault::{Fault, inject};
use ptx_interpreter::{Accumulator, Rounding};
use test_data::{panic_of, relative_error};

use crate::support::operand::values;
use crate::{
    A, SHAPE, TF32, assert_high_precision, assert_near, assert_right, experts, plain, step, step_in_bf16, tensor,
};

/// `burn::backend::Cuda` on another runtime.
type Offline = Fusion<CubeBackend<GenerateCuda, f32, i32, u8>>;
type Linear = burn::nn::Linear<A<Offline>>;

/// A fault of the kernels with this name prefix.
type OfKernel = (&'static str, Fault);

/// A device with few SMs and these faults. `None` without NVRTC, in which case the test prints a
/// note.
fn device(sms: u16, faults: &[OfKernel]) -> Option<(Running, OfflineDevice)> {
    let running = execute(Execution::default())?;
    let device = OfflineDevice { sm: 90, sms };
    faults.iter().for_each(|(kernel, fault)| inject(&device, kernel, *fault));
    Some((running, device))
}

fn layer(recipe: Recipe, device: &OfflineDevice) -> Linear {
    crate::layer::<Offline>(&Float8Config::new(recipe), device).expect("the device computes")
}

/// Checks that a linear matches the CPU despite the faults. Returns its report.
fn survives(sms: u16, recipe: Recipe, faults: &[OfKernel]) -> Option<Report> {
    let (_running, device) = device(sms, faults)?;
    let layer = layer(recipe, &device);
    // Twice: in the second step the faults are known.
    (0..2).for_each(|_| assert_right::<Offline>(recipe, &layer, &device));
    Some(report(&layer))
}

/// Paths of the GEMMs that ran, in the order fprop, dgrad, wgrad, without consecutive repeats.
fn paths(report: &Report) -> Vec<String> {
    let mut paths: Vec<_> = report.layers[0].gemms().into_iter().filter_map(|(_, gemm)| gemm.path.clone()).collect();
    paths.dedup();
    paths
}

fn failed(report: &Report) -> Float8Error {
    report.verify().expect_err("a kernel is wrong, or results are lost")
}

/// Path and finding of the first failure.
fn failure(report: &Report) -> [String; 2] {
    let Float8Error::SelfCheck(failure) = failed(report) else { panic!("{report}") };
    [failure.path, failure.found]
}

#[test]
fn a_device_that_is_right_is_asked_once() {
    let Some((_running, device)) = device(4, &[]) else { return };
    let layer = layer(Recipe::Tensorwise, &device);
    step::<Offline>(&layer, &device);
    take_waits();
    let x = tensor::<Offline, 2>(1, [SHAPE[0], SHAPE[1]], &device).require_grad();
    let grads = layer.forward(x.clone()).sum().backward();
    assert_eq!(take_waits(), 0, "the host waited for the device");
    drop(grads);
    let report = report(&layer);
    let found = &report.self_check;
    assert!(found.kernels > 5 && found.failures.is_empty() && found.lost.is_none() && !found.off, "{found:?}");
    let text = report.to_string();
    let last = text.lines().last().expect("lines");
    assert!(last.starts_with(&format!("self-check: {} kernels, all right, ", found.kernels)), "{last}");
}

#[test]
fn every_recipe_matches_the_cpu() {
    for (i, recipe) in Recipe::ALL.into_iter().enumerate() {
        let Some(report) = survives(70 + i as u16, recipe, &[]) else { return };
        report.verify().expect("all is right");
        let (path, costly) = match recipe {
            Recipe::Mxfp8 => ("bf16 wgmma", 3),
            Recipe::Mxfp8WgradWithHp => ("bf16 wgmma", 2),
            _ => ("wgmma", 0),
        };
        assert_eq!(paths(&report)[0], path, "{recipe}");
        // MX on Hopper runs at bf16's speed at best. The report notes this at each GEMM.
        let text = report.to_string();
        assert_eq!(text.matches("bf16's speed at best").count(), costly, "{text}");
    }
}

/// Buffers of `gemm_hopper`: tensor maps of A, B and the output, A's codes, the scales of A and of
/// B, the bias.
const CODES_A: usize = 0;
const SCALES_A: usize = 4;
const BIAS: usize = 6;
/// Ends of the groups, which have no bias.
const ENDS: usize = 6;

const DROPPED_STAGE: Fault = Fault::Read(CODES_A, |codes| codes[128..160].fill(0));
const NEXT_PATH: &str = "f16 mma (self-check of wgmma failed)";

/// Kernels that do not run, and operands that are wrong: much in few elements, or little in many.
#[test]
fn wrong_gemms_take_the_next_path() {
    let differs = "elements differ";
    let kinds: [(Recipe, Fault, &str); 8] = [
        // The kernel does not compile.
        (Recipe::Tensorwise, Fault::Refuse, ""),
        // Its launches are lost, with an error message and without.
        (Recipe::Tensorwise, Fault::Panic("no memory is left"), "no memory is left"),
        (Recipe::Tensorwise, Fault::Drop, ""),
        // It reads shared memory as if rows were not swizzled.
        (Recipe::Tensorwise, Fault::Edit("4611686293305360384", "274877972480"), differs),
        (Recipe::Tensorwise, DROPPED_STAGE, differs),
        // A neighbour's block scale, a wrong row map, and no bias.
        (Recipe::Blockwise, Fault::Read(SCALES_A, |scales| scales.rotate_left(4)), differs),
        (Recipe::Tensorwise, Fault::Read(CODES_A, |codes| codes.rotate_left(codes.len() / 2)), differs),
        (Recipe::Tensorwise, Fault::Read(BIAS, |bias| bias.fill(0)), differs),
    ];
    for (i, (recipe, fault, words)) in kinds.into_iter().enumerate() {
        let Some(report) = survives(8 + i as u16, recipe, &[("gemm_hopper", fault)]) else { return };
        assert_eq!(paths(&report)[0], NEXT_PATH, "{fault:?}");
        assert!(report.to_string().contains(NEXT_PATH), "{report}");
        let [path, found] = failure(&report);
        assert!(path == "wgmma" && found.contains(words), "{fault:?}: {path}: {found}");
    }
}

/// A GEMM of groups, which is the first for these scales.
#[test]
fn wrong_operands_of_a_grouped_gemm_are_noticed() {
    let no_rows_in_the_first = Fault::Read(ENDS, |ends| ends[..4].fill(0));
    let (want, _) = experts::<Flex>(Recipe::Rowwise, &Default::default());
    for (sms, fault) in [(60, DROPPED_STAGE), (61, no_rows_in_the_first)] {
        let Some((_running, device)) = device(sms, &[("gemm_hopper", fault)]) else { return };
        let (got, report) = experts::<Offline>(Recipe::Rowwise, &device);
        assert_near(&got, &want, &format!("{fault:?}"), [1e-5; 4]);
        assert_eq!(paths(&report)[0], NEXT_PATH, "{fault:?}");
        let mut failures = report.self_check.failures.iter();
        let is_grouped = failures.any(|failure| failure.path == "wgmma" && failure.call.contains("groups of Rows"));
        assert!(is_grouped, "{fault:?}: {:?}", report.self_check);
    }
}

/// Tensor cores that keep fewer bits than any known ones.
#[test]
fn an_accumulator_that_loses_bits_is_noticed() {
    let Some((running, device)) = device(16, &[]) else { return };
    running.set_accumulator(Accumulator::Truncated { fraction_bits: 4, rounding: Rounding::ToZero });
    let layer = layer(Recipe::Tensorwise, &device);
    assert_right::<Offline>(Recipe::Tensorwise, &layer, &device);
    assert_eq!(paths(&report(&layer)), [NEXT_PATH]);
}

/// The emulated path is the last one that the preflight tries.
#[test]
fn two_wrong_gemms_leave_the_third() {
    let two = ["gemm_hopper", "gemm_half"].map(|kernel| (kernel, Fault::Refuse));
    let Some(report) = survives(20, Recipe::Tensorwise, &two) else { return };
    assert_eq!(paths(&report), ["emulated (self-check of wgmma, f16 mma failed)"]);
    let Some((_running, device)) = device(21, &[("gemm_", Fault::Refuse)]) else { return };
    let error = crate::layer::<Offline>(&Float8Config::tensorwise(), &device).expect_err("nothing multiplies");
    assert!(matches!(&error, Float8Error::Preflight { what: "GEMM", .. }), "{error:?}");
}

/// If no GEMM or no cast is left, the host computes the step that has begun, and later ones run in
/// high precision.
fn ends_on_the_host(recipe: Recipe, device: &OfflineDevice, late: &[OfKernel]) -> Report {
    let layer = layer(recipe, device);
    late.iter().for_each(|(kernel, fault)| inject(device, kernel, *fault));
    assert_right::<Offline>(recipe, &layer, device);
    let report = report(&layer);
    failure(&report);
    assert_high_precision::<Offline>(&layer, device);
    report
}

#[test]
fn without_a_gemm_the_host_ends_the_step() {
    // After the preflight. The emulated kernel reads codes that are not there.
    let unread = Fault::Read(0, |codes| codes.rotate_left(codes.len() / 2));
    let faults = [("gemm_hopper", Fault::Refuse), ("gemm_half", Fault::Refuse), ("gemm_", unread)];
    for (sms, recipe) in [(22, Recipe::Tensorwise), (23, Recipe::Mxfp8)] {
        let Some((_running, device)) = device(sms, &[]) else { return };
        let [path] = &paths(&ends_on_the_host(recipe, &device, &faults))[..] else { panic!("{recipe}: several paths") };
        assert!(path.starts_with("host (self-check of ") && path.ends_with("emulated failed)"), "{path}");
    }
}

#[test]
fn wrong_casts_are_made_without_their_instructions() {
    let edit = Fault::Edit("cvt.rn.satfinite.e4m3x2", "cvt.rn.satfinite.e5m2x2");
    let Some(report) = survives(24, Recipe::Rowwise, &[("cast_", edit)]) else { return };
    assert_eq!(paths(&report), ["wgmma"]);
    let [path, found] = failure(&report);
    assert!(path == "casts by cvt to FP8" && found.starts_with("code ["), "{path}: {found}");
    // Every variant of the kernel is wrong. The preflight uses another cast.
    for (sms, recipe) in [(25, Recipe::Tensorwise), (26, Recipe::Mxfp8), (27, Recipe::Delayed)] {
        let Some((_running, device)) = device(sms, &[("cast_tiles", Fault::Drop)]) else { return };
        ends_on_the_host(recipe, &device, &[]);
    }
}

/// Kernels whose self-check failed.
fn failed_calls(layer: &Linear) -> Vec<String> {
    report(layer).self_check.failures.iter().map(|failure| failure.call.to_string()).collect()
}

/// Results of RMSNorm, SwiGLU, rotary positions and attention, and a gradient through all of them.
fn fused<B: Float8Backend>(device: &B::Device) -> Vec<f32> {
    let x = tensor::<B, 3>(1, [2, 50, 64], device).require_grad();
    let [cos, sin] = [3, 4].map(|seed| tensor::<B, 2>(seed, [50, 16], device));
    let h = nn::rms_norm(x.clone(), tensor::<B, 1>(2, [64], device), 1e-5);
    let turned = nn::rotary(h.clone().reshape([2, 50, 2, 32]), cos, sin);
    let y = nn::swiglu(h, x.clone() * 0.5);
    let q = turned.clone().swap_dims(1, 2);
    let attended = nn::attention(q.clone(), q.clone(), q, None, AttentionModuleOptions::default());
    let grads = (y.clone().sum() + turned.clone().sum() + attended.clone().powf_scalar(2.0).sum()).backward();
    [values(y), values(turned), values(attended), values(x.grad(&grads).expect("tracked"))].concat()
}

/// Burn's operations replace wrong fused kernels. Correct kernels stay in use.
#[test]
fn wrong_fused_kernels_end_in_burns_operations() {
    let faults = ["rms_norm", "swiglu", "attention_"].map(|kernel| (kernel, Fault::Drop));
    let Some((_running, device)) = device(29, &faults) else { return };
    let layer = layer(Recipe::Tensorwise, &device);
    let got = fused::<Offline>(&device);
    // Again, now that the wrong kernels are not launched any more.
    assert_eq!(got, fused::<Offline>(&device));
    assert!(relative_error(&got, &fused::<Flex>(&Default::default())) < TF32);
    let calls = failed_calls(&layer);
    for kernel in ["RmsNorm of", "RmsNorm backward", "SwiGlu of", "attention by tiles of"] {
        assert!(calls.iter().any(|call| call.starts_with(kernel)), "{calls:?}");
    }
    assert!(!calls.iter().any(|call| call.contains("Rotary")), "{calls:?}");
}

/// Attention in bf16 and a gradient through it.
fn attended<B: Float8Backend>(device: &B::Device) -> Vec<f32> {
    let q = tensor::<B, 4>(1, [1, 2, 100, 64], device).require_grad();
    let half = q.clone().cast(DType::BF16);
    let y = nn::attention(half.clone(), half.clone(), half, None, AttentionModuleOptions::default());
    let y = y.cast(DType::F32);
    let grads = y.clone().powf_scalar(2.0).sum().backward();
    [values(y), values(q.grad(&grads).expect("tracked"))].concat()
}

/// Attention on warpgroups with its second operand read in the wrong order leaves the work to
/// `mma.sync`.
#[test]
fn wrong_attention_on_warpgroups_leaves_it_to_mma() {
    let fault = Fault::Edit("add, 1, 1, 1;", "add, 1, 1, 0;");
    let Some((_running, device)) = device(30, &[("attention_hopper", fault)]) else { return };
    let layer = layer(Recipe::Tensorwise, &device);
    let got = attended::<Offline>(&device);
    assert!(relative_error(&got, &attended::<Flex>(&Default::default())) < 1e-2);
    let calls = failed_calls(&layer);
    assert!(calls.iter().any(|call| call.starts_with("attention by wgmma of")), "{calls:?}");
    assert!(!calls.iter().any(|call| call.contains("by mma")), "{calls:?}");
}

/// Few rows have their own kernel. A wrong one leaves them to tensor cores, and does not affect
/// many rows. Both count for their own paths.
#[test]
fn a_wrong_gemv_leaves_few_rows_to_tensor_cores() {
    let [m, k, _] = SHAPE;
    let cpu = crate::layer::<Flex>(&Float8Config::tensorwise(), &Default::default()).expect("a CPU computes");
    let failed = "wgmma (self-check of gemv failed)";
    for (sms, fault, path) in [(44, None, "gemv"), (45, Some(Fault::Refuse), failed), (46, Some(Fault::Drop), failed)] {
        let Some((_running, device)) = device(sms, fault.map(|fault| ("gemv", fault)).as_slice()) else { return };
        let layer = layer(Recipe::Tensorwise, &device);
        for rows in [2, 1, 2] {
            let want = values(cpu.forward(tensor::<Flex, 2>(5, [rows, k], &Default::default())));
            let y = values(layer.forward(tensor::<Offline, 2>(5, [rows, k], &device)));
            assert!(relative_error(&y, &want) < 1e-5, "{rows} rows on {path}");
        }
        assert_eq!(paths(&report(&layer)), [path]);
        layer.forward(tensor::<Offline, 2>(1, [m, k], &device));
        assert_eq!(paths(&report(&layer)), ["wgmma"]);
        let calls = Monitor::new(&layer).gemm_calls();
        assert!(fault.is_some() || calls == BTreeMap::from([("gemv".into(), 3), ("wgmma".into(), 1)]), "{calls:?}");
    }
}

/// A weight gradient in high precision has a kernel for bf16. If it is wrong, Burn multiplies.
#[test]
fn a_wrong_kernel_leaves_high_precision_to_burn() {
    let recipe = Recipe::RowwiseWithGwHp;
    let (want, _) = step_in_bf16::<Flex>(recipe, &Default::default());
    // Products of contiguous rows read B as if its contraction were contiguous.
    let edit = ("gemm_hopper", Fault::Edit("add, 1, 1, 1, 1;", "add, 1, 1, 1, 0;"));
    let failed = "burn (self-check of bf16 wgmma failed)";
    for (sms, faults, path) in [(64, vec![], "bf16 wgmma"), (65, vec![edit], failed)] {
        let Some((_running, device)) = device(sms, &faults) else { return };
        // In the second step the fault is known.
        let [first, _] = [(); 2].map(|()| {
            let (got, report) = step_in_bf16::<Offline>(recipe, &device);
            assert_near(&got, &want, path, [1e-2; 4]);
            report
        });
        assert_eq!(paths(&first), ["wgmma", path]);
        let failures = first.self_check.failures.iter().map(|failure| &*failure.path);
        assert_eq!(failures.collect::<Vec<_>>(), vec!["high precision by bf16 wgmma"; faults.len()]);
    }
}

/// CubeCL looks for the headers when it compiles the first kernel, in the device's thread.
#[test]
fn a_device_that_computes_nothing_is_an_error() {
    let Some((_running, device)) = device(28, &[("", Fault::Panic("CUDA installation not found."))]) else { return };
    let error = crate::layer::<Offline>(&Float8Config::tensorwise(), &device).expect_err("nothing runs");
    assert!(matches!(&error, Float8Error::Preflight { what: "cast", .. }), "{error:?}");
    assert!(error.to_string().contains("CUDA installation not found."), "{error}");
    // The same without a configuration.
    let text = panic_of(|| drop(step::<Offline>(&plain(&device), &device)));
    assert_eq!(text, error.to_string());
}

/// A launch that is lost after the first use ends the run at the next linear. Without another
/// linear, `verify` fails.
#[test]
fn a_launch_that_is_lost_later_is_noticed() {
    for (sms, kernel) in [(32, "gemm_hopper"), (33, "elemwise")] {
        let Some((_running, device)) = device(sms, &[]) else { return };
        let layer = layer(Recipe::Tensorwise, &device);
        let run = || drop(step::<Offline>(&layer, &device));
        run();
        report(&layer).verify().expect("all is right");
        inject(&device, kernel, Fault::Panic("the device is full"));
        // The launch may be lost before or after the host reaches another linear.
        let ended = catch_unwind(AssertUnwindSafe(run));
        let Float8Error::Lost { message } = failed(&report(&layer)) else { panic!("{kernel}") };
        assert!(message.starts_with("a task of its thread has panicked: the device is full"), "{message}");
        let text = panic_of(run);
        assert!(text.contains("the device is full"), "{kernel}: {ended:?} {text}");
    }
}

/// An error of an earlier launch may appear where a check waits for the device. The checked kernel
/// is not at fault.
#[test]
fn an_error_of_another_kernel_is_no_fault_of_ours() {
    let Some((_running, device)) = device(34, &[("elemwise", Fault::Refuse)]) else { return };
    let layer = layer(Recipe::Tensorwise, &device);
    let x = tensor::<Offline, 2>(1, [SHAPE[0], SHAPE[1]], &device);
    let ended = catch_unwind(AssertUnwindSafe(|| drop(layer.forward(x * 0.5 + 1.0).into_data())));
    let report = report(&layer);
    assert!(report.self_check.failures.is_empty(), "{report}");
    let Float8Error::Lost { message } = failed(&report) else { panic!("{ended:?}: {report}") };
    assert!(message.contains("elemwise") && message.contains("does not compile"), "{message}");
}

#[test]
fn strict_stops_at_a_kernel_that_is_wrong() {
    let Some((_running, device)) = device(36, &[("gemm_hopper", Fault::Refuse)]) else { return };
    // The GEMM of the preflight took another path.
    let config = Float8Config::tensorwise().with_strict(true);
    let layer = crate::layer::<Offline>(&config, &device).expect("the device computes");
    let text = panic_of(|| drop(step::<Offline>(&layer, &device)));
    assert!(text.starts_with("self-check of wgmma failed: "), "{text}");
}

#[test]
fn threads_that_use_a_kernel_at_once_wait_for_its_check() {
    let Some((_running, device)) = device(40, &[("gemm_hopper", Fault::Drop)]) else { return };
    let run = || assert_right::<Offline>(Recipe::Tensorwise, &layer(Recipe::Tensorwise, &device), &device);
    std::thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(run))));
}
