//! GEMMs with a wait that never ends.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute};
use codegen::fault::{Fault, inject};
use cubecl_core::Runtime;
use kernel_tests::{FAST, Gemm, PRECISE};

/// The launch fails after ten seconds, and the error names the mbarrier.
#[test]
fn a_stuck_wait_is_an_error() {
    for seed in [0, 7] {
        let Some(_running) = execute(Execution { seed }) else { return };
        for (sm, kernel) in [(90, "gemm_hopper"), (100, "gemm_blackwell")] {
            // A device that no other test uses.
            let device = OfflineDevice { sm, sms: 7 };
            // A stage needs one more arrival than it gets.
            let [from, to] = ["[%0], 1;", "[%0], 2;"];
            inject(&device, kernel, Fault::Edit(from, to));
            // Fast accumulation waits while products are in flight.
            for config in [PRECISE, FAST] {
                let gemm = Gemm { config, ..Gemm::new([64, 64, 128]) };
                let [a, b] = gemm.matrices();
                let error = gemm.compare(&GenerateCuda::client(&device), [&a, &b], Some(1.0)).unwrap_err().to_string();
                assert!(error.contains("the kernel traps") && error.contains("s in which nothing went on"), "{error}");
                assert!(error.contains("waits for mbarrier"), "{error}");
            }
        }
    }
}
