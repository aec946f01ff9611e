//! Devices that do not exist and what each architecture's can do, as CubeCL's CUDA runtime describes them; what was launched on
//! them, and how launches run.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use burn_backend::DeviceOps;
use cubecl_common::device::{Device, DeviceId};
use cubecl_common::hash::StableHash;
use cubecl_common::profile::TimingMethod;
use cubecl_core::ir::features::{Plane, Tma, TypeUsage};
use cubecl_core::ir::{
    BarrierLevel, DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties, OpaqueType,
    SemanticType, VectorSize,
};
use cubecl_cpp::cuda::CudaDialect;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaWmmaCompiler;
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features, register_scaled_mma_features,
    register_wmma_features,
};
use cubecl_cpp::{DialectWmmaCompiler, register_supported_types};
use cubecl_runtime::id::KernelId;
use ptx_interpreter::Accumulator;

use crate::nvrtc::Nvrtc;

/// CubeCL's compiler for CUDA.
pub type CudaCompiler = CppCompiler<CudaDialect<CudaWmmaCompiler>>;

/// A device that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OfflineDevice {
    /// Ten times the compute capability, such as 90.
    pub sm: u16,
    /// Few of them have even small problems take large tiles, and several tiles to a block.
    pub sms: u16,
}

impl OfflineDevice {
    /// A device as large as an H200.
    pub const fn new(sm: u16) -> Self {
        Self { sm, sms: 132 }
    }
}

impl Default for OfflineDevice {
    fn default() -> Self {
        Self::new(90)
    }
}

impl Device for OfflineDevice {
    fn from_id(id: DeviceId) -> Self {
        Self { sm: id.index_id, sms: id.type_id }
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: self.sms, index_id: self.sm }
    }
}

impl DeviceOps for OfflineDevice {}

/// A kernel as it would have gone to NVRTC.
#[derive(Clone, Debug)]
pub struct Generated {
    /// The architecture of the device.
    pub sm: u32,
    /// Key of the kernel in CubeCL's cache of compiled kernels.
    pub cache_key: StableHash,
    /// The entry point.
    pub name: String,
    /// CUDA C++.
    pub source: String,
    /// Bytes that the launch would add to the kernel's static shared memory.
    pub dynamic_shared: usize,
    /// Threads in a block, by axis.
    pub block: [u32; 3],
    /// Whether the host copies shapes to the device before the launch.
    pub copies_shapes: bool,
}

impl Generated {
    /// Threads in a block.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// The source with its declarations sorted: CubeCL prints the types that a kernel uses in an order that changes from one
    /// time to the next.
    pub fn key(&self) -> String {
        let body = self.source.find("extern \"C\"").unwrap_or(0);
        let mut declarations: Vec<&str> = self.source[..body].lines().collect();
        declarations.sort_unstable();
        declarations.join("\n") + &self.source[body..]
    }
}

/// What was launched since the last [`take`].
pub(crate) static GENERATED: Mutex<Vec<Result<Generated, String>>> = Mutex::new(Vec::new());

/// All kernels launched so far.
///
/// # Panics
/// If CubeCL could not generate one.
pub fn take() -> Vec<Generated> {
    let generated = core::mem::take(&mut *GENERATED.lock().unwrap());
    generated.into_iter().map(|kernel| kernel.unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// Reads and syncs: times that a host would have waited for its device.
pub(crate) static WAITS: AtomicUsize = AtomicUsize::new(0);

/// Pieces of device memory that were asked for.
pub(crate) static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

/// How many pieces of device memory were asked for since the last call.
pub fn take_allocations() -> usize {
    ALLOCATIONS.swap(0, Relaxed)
}

/// How often the host would have waited since the last call.
pub fn take_waits() -> usize {
    WAITS.swap(0, Relaxed)
}

/// Launches are only counted while this is true.
pub(crate) static IDLE: AtomicBool = AtomicBool::new(false);

/// The launches that were counted.
pub(crate) static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

/// Bytes of the tensors that these were given.
pub(crate) static BYTES: AtomicU64 = AtomicU64::new(0);

/// Pieces of host memory that were copied to the device.
pub(crate) static UPLOADS: AtomicUsize = AtomicUsize::new(0);

/// While it lives, launches on [`GenerateCuda`](crate::device::GenerateCuda) are counted and nothing else: no kernel is generated.
pub struct Idle(());

impl Idle {
    /// Launches since the last call.
    pub fn take_launches(&self) -> usize {
        LAUNCHES.swap(0, Relaxed)
    }

    /// Copies from the host since the last call.
    pub fn take_uploads(&self) -> usize {
        UPLOADS.swap(0, Relaxed)
    }

    /// Bytes of all tensors that launches since the last call were given: what they move, if each reads or writes all of it once.
    pub fn take_bytes(&self) -> u64 {
        BYTES.swap(0, Relaxed)
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        IDLE.store(false, Relaxed);
    }
}

/// From here on launches are only counted, until the result is dropped: for measurements of what they cost the host.
pub fn idle() -> Idle {
    IDLE.store(true, Relaxed);
    Idle(())
}

/// The kernels generated so far, by device, while results are not read.
pub(crate) static UNREAD: Mutex<Option<HashSet<(u32, KernelId)>>> = Mutex::new(None);

/// While it lives, reads of results are errors and each kernel is generated once.
pub struct Unread(());

impl Drop for Unread {
    fn drop(&mut self) {
        *UNREAD.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// From here on reads are errors, until the result is dropped, so that a check ends where its kernels have been launched; and a
/// launch of a kernel that was generated before does nothing.
pub fn unread() -> Unread {
    *UNREAD.lock().unwrap_or_else(PoisonError::into_inner) = Some(HashSet::new());
    Unread(())
}

/// How launches run that are executed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Execution {
    /// See [`Launch::seed`](ptx_interpreter::Launch::seed).
    pub seed: u64,
}

/// The compiler, and how to run what it makes.
pub(crate) struct Executor {
    pub(crate) nvrtc: Arc<Nvrtc>,
    pub(crate) seed: u64,
    pub(crate) accumulator: Accumulator,
    /// How often each kernel was launched, by its source.
    pub(crate) launches: HashMap<String, usize>,
}

/// Set while launches are executed.
pub(crate) static EXECUTION: Mutex<Option<Executor>> = Mutex::new(None);

/// One execution at a time, or several that are alike: seeds are the process's.
static TURN: RwLock<()> = RwLock::new(());

/// How many share the execution at hand.
static SHARED: Mutex<usize> = Mutex::new(0);

/// While it lives, launches on [`GenerateCuda`](crate::device::GenerateCuda) are executed.
pub struct Running {
    _turn: RwLockWriteGuard<'static, ()>,
}

/// While it lives, launches are executed, also those of others that hold one.
pub struct RunningShared {
    _turn: RwLockReadGuard<'static, ()>,
}

impl Running {
    /// Has tensor cores of launches from here on add products of FP8 codes like this; in full at first.
    pub fn set_accumulator(&self, accumulator: Accumulator) {
        let mut execution = EXECUTION.lock().unwrap_or_else(PoisonError::into_inner);
        execution.as_mut().expect("launches are executed").accumulator = accumulator;
    }

    /// How many launches were of kernels whose CUDA has this text.
    pub fn launches_of(&self, text: &str) -> usize {
        let execution = EXECUTION.lock().unwrap_or_else(PoisonError::into_inner);
        let launches = &execution.as_ref().expect("launches are executed").launches;
        launches.iter().filter(|(source, _)| source.contains(text)).map(|(_, count)| count).sum()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        end();
    }
}

impl Drop for RunningShared {
    fn drop(&mut self) {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        *shared -= 1;
        if *shared == 0 {
            end();
        }
    }
}

/// From here on launches are compiled to PTX and interpreted ([`ptx_interpreter`]) until the result is dropped; memory
/// allocated meanwhile starts as poison. Waits for other executions of the process. Faults of kernels are errors of the next
/// read or sync.
///
/// Nothing if `FLOAT8_CUDA_TOOLS` names no toolkit; the test says so then, and is skipped.
///
/// # Panics
/// If it names one that is none, or names none in CI.
pub fn execute(execution: Execution) -> Option<Running> {
    let turn = TURN.write().unwrap_or_else(PoisonError::into_inner);
    begin(execution)?;
    Some(Running { _turn: turn })
}

/// [`execute`] by default settings, which others may do at the same time.
///
/// # Panics
/// As [`execute`].
pub fn execute_shared() -> Option<RunningShared> {
    let turn = TURN.read().unwrap_or_else(PoisonError::into_inner);
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if *shared == 0 {
        begin(Execution::default())?;
    }
    *shared += 1;
    Some(RunningShared { _turn: turn })
}

/// Has launches executed; nothing without a toolkit.
fn begin(execution: Execution) -> Option<()> {
    static NVRTC: OnceLock<Arc<Nvrtc>> = OnceLock::new();
    let nvrtc = match NVRTC.get() {
        Some(nvrtc) => nvrtc.clone(),
        None => {
            let nvrtc = Arc::new(Nvrtc::from_env()?);
            NVRTC.get_or_init(|| nvrtc).clone()
        }
    };
    *EXECUTION.lock().unwrap_or_else(PoisonError::into_inner) =
        Some(Executor { nvrtc, seed: execution.seed, accumulator: Accumulator::Full, launches: HashMap::new() });
    Some(())
}

/// Has no more launches executed.
fn end() {
    *EXECUTION.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Runs `check` for all of these beside each other, since each device has a thread of its own.
pub fn on_each<T: Send, const N: usize>(devices: [T; N], check: impl Fn(T) + Sync) {
    let check = &check;
    std::thread::scope(|scope| devices.map(|device| drop(scope.spawn(move || check(device)))));
}

pub(crate) const MAX_GRID: (u32, u32, u32) = (i32::MAX as u32, 65535, 65535);

/// How the compiler is told to print for this architecture.
pub(crate) fn options(sm: u32) -> CompilationOptions {
    CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: sm >= 70,
            clusters: sm >= 90,
            fast_math: true,
            fast_tanh: sm >= 75,
            elect_sync: sm >= 90,
        },
    }
}

/// Bytes of shared memory that a block may have, by the CUDA programming guide's table of compute capabilities.
pub fn max_shared_memory(sm: u32) -> usize {
    match sm {
        80 | 87 => 163 * 1024,
        86 | 89 | 120.. => 99 * 1024,
        _ => 227 * 1024,
    }
}

/// What CubeCL's CUDA runtime registers for such a device.
pub(crate) fn properties(device: &OfflineDevice) -> DeviceProperties {
    let sm = u32::from(device.sm);
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: max_shared_memory(sm),
        max_cube_count: MAX_GRID,
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(u32::from(device.sms)),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        max_vector_size: VectorSize::MAX,
    };
    let memory = MemoryDeviceProperties { max_page_size: 20 << 30, alignment: 512 };
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);
    register_supported_types(&mut properties);
    let stored = TypeUsage::Conversion | TypeUsage::Buffer;
    if sm >= 89 {
        for kind in [FloatKind::E4M3, FloatKind::E5M2] {
            properties.register_type_usage(ElemType::Float(kind), stored);
        }
    }
    if sm >= 100 {
        properties.register_type_usage(ElemType::Float(FloatKind::UE8M0), stored);
    }
    properties.register_type_usage(OpaqueType::Barrier(BarrierLevel::Cube), TypeUsage::Buffer);
    for plane in [Plane::Sync, Plane::Ops, Plane::NonUniformControlFlow] {
        properties.features.plane.insert(plane);
    }
    properties.features.copy_async = true;
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    if sm >= 90 {
        properties.features.tma.insert(Tma::Base);
        properties.register_semantic_type(SemanticType::TensorMap);
        properties.features.cube_cluster = true;
    }
    let arch = CudaArchitecture { version: sm };
    register_wmma_features(CudaWmmaCompiler::supported_wmma_combinations(&arch), &mut properties);
    register_mma_features(CudaWmmaCompiler::supported_mma_combinations(&arch), &mut properties);
    register_scaled_mma_features(CudaWmmaCompiler::supported_scaled_mma_combinations(&arch), &mut properties);
    properties
}
