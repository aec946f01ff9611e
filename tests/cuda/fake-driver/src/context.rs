//! Context of a device: memory, kernels, streams and events. Work of a stream runs as late as the
//! API allows, which exposes missing waits and buffers that the host frees too early.

use std::collections::{HashMap, VecDeque};

use cudarc::driver::sys::CUresult::{self, *};

use crate::device::Model;
use crate::launch::{Function, Launch, refused};
use crate::memory::{self, Memory};

/// A place of a copy.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    Host(usize),
    Device(u64),
}

/// Rows of bytes to copy.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    pub from: Place,
    pub to: Place,
    pub from_pitch: usize,
    pub to_pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// Work of a stream.
enum Work {
    Copy(Copy),
    Launch(Launch),
    Free(u64),
    /// Waits for this much work of another stream.
    Wait(usize, u64),
}

/// Queue of work, with the number of pieces that are done.
#[derive(Default)]
struct Stream {
    done: u64,
    waiting: VecDeque<Work>,
}

impl Stream {
    fn end(&self) -> u64 {
        self.done + self.waiting.len() as u64
    }
}

/// Fault of the driver, for tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Launches of kernels with this name prefix do nothing.
    Lose(String),
    /// Kernels with this name prefix do not load.
    Refuse(String),
    /// Barriers of kernels with this name prefix wait for one more arrival than comes.
    Stick(String),
    /// The device has this much memory.
    Memory(u64),
}

impl Fault {
    /// Fault of a text such as `lose gemm`.
    pub fn parse(text: &str) -> Option<Self> {
        let (kind, value) = text.split_once(' ')?;
        Some(match kind {
            "lose" => Self::Lose(value.into()),
            "refuse" => Self::Refuse(value.into()),
            "stick" => Self::Stick(value.into()),
            "memory" => Self::Memory(value.parse().ok()?),
            _ => return None,
        })
    }
}

/// State of a device.
pub struct Context {
    pub model: Model,
    pub memory: Memory,
    /// Whether launches and copies to the device are checked alone. Every read is zeros.
    check_only: bool,
    functions: Vec<Function>,
    streams: Vec<Stream>,
    /// Stream and amount of its work, once recorded.
    events: HashMap<usize, Option<(usize, u64)>>,
    created: usize,
    /// Error of a kernel: every later call returns it.
    failed: Option<CUresult>,
    faults: Vec<Fault>,
}

impl Context {
    pub fn new(model: Model) -> Self {
        Self {
            model,
            memory: Memory::new(model.memory()),
            check_only: std::env::var_os("FAKE_CUDA_CHECK_ONLY").is_some(),
            functions: vec![],
            streams: vec![],
            events: HashMap::new(),
            created: 0,
            failed: None,
            faults: vec![],
        }
    }

    /// The error of an earlier kernel.
    pub fn healthy(&self) -> Result<(), CUresult> {
        self.failed.map_or(Ok(()), Err)
    }

    pub fn inject(&mut self, fault: Fault) {
        match fault {
            Fault::Memory(limit) => self.memory.limit = limit,
            fault => self.faults.push(fault),
        }
    }

    fn has(&self, name: &str, fault: impl Fn(&Fault) -> Option<&String>) -> bool {
        self.faults.iter().filter_map(fault).any(|prefix| name.starts_with(prefix.as_str()))
    }

    /// Loads a module; returns the index of its kernel.
    pub fn load(&mut self, ptx: &str) -> Result<usize, CUresult> {
        let mut function = Function::load(ptx, self.model)?;
        let name = function.kernel.name.clone();
        if self.has(&name, |fault| if let Fault::Refuse(name) = fault { Some(name) } else { None }) {
            return Err(refused(&format!("{name} is refused"), CUDA_ERROR_INVALID_PTX));
        }
        if self.has(&name, |fault| if let Fault::Stick(name) = fault { Some(name) } else { None }) {
            let line = |line: &str| match line.contains("mbarrier.init") {
                true => line.replace(", 1;", ", 2;") + "\n",
                false => format!("{line}\n"),
            };
            function = Function::load(&ptx.lines().map(line).collect::<String>(), self.model)?;
        }
        self.functions.push(function);
        Ok(self.functions.len() - 1)
    }

    pub fn function(&mut self, index: usize) -> Result<&mut Function, CUresult> {
        self.functions.get_mut(index).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    /// Creates a stream; returns its index.
    pub fn create_stream(&mut self) -> usize {
        self.streams.push(Stream::default());
        self.streams.len() - 1
    }

    fn push(&mut self, stream: usize, work: Work) -> Result<(), CUresult> {
        self.streams.get_mut(stream).ok_or(CUDA_ERROR_INVALID_HANDLE)?.waiting.push_back(work);
        Ok(())
    }

    pub fn launch(&mut self, stream: usize, launch: Launch) -> Result<(), CUresult> {
        let lost = self.has(launch.name(), |fault| if let Fault::Lose(name) = fault { Some(name) } else { None });
        if lost || self.check_only { Ok(()) } else { self.push(stream, Work::Launch(launch)) }
    }

    pub fn free(&mut self, stream: usize, address: u64) -> Result<(), CUresult> {
        self.memory.find(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        self.push(stream, Work::Free(address))
    }

    /// Queues a copy. A copy to memory that is not pinned is done when the call returns.
    pub fn copy(&mut self, stream: usize, copy: Copy) -> Result<(), CUresult> {
        let most = i32::MAX as usize;
        let rows = copy.height > 1;
        if rows && [copy.from_pitch, copy.to_pitch].iter().any(|pitch| *pitch < copy.width || *pitch > most) {
            return Err(refused(&format!("{copy:?}: a pitch"), CUDA_ERROR_INVALID_VALUE));
        }
        for (place, pitch) in [(copy.from, copy.from_pitch), (copy.to, copy.to_pitch)] {
            let len = copy.height.saturating_sub(1) * pitch + copy.width;
            let inside = match place {
                Place::Host(host) => host != 0,
                Place::Device(address) => copy.width == 0 || self.memory.locate(address, len).is_some(),
            };
            if !inside {
                return Err(refused(&format!("{copy:?} leaves its memory"), CUDA_ERROR_INVALID_VALUE));
            }
        }
        if self.check_only && matches!(copy.to, Place::Device(_)) {
            return Ok(());
        }
        self.push(stream, Work::Copy(copy))?;
        match copy.to {
            Place::Host(host) if !memory::is_pinned(host) => self.finish(stream),
            _ => Ok(()),
        }
    }

    /// Creates an event; returns its number.
    pub fn create_event(&mut self) -> usize {
        self.created += 1;
        self.events.insert(self.created, None);
        self.created
    }

    pub fn record(&mut self, event: usize, stream: usize) -> Result<(), CUresult> {
        let end = self.streams.get(stream).ok_or(CUDA_ERROR_INVALID_HANDLE)?.end();
        *self.events.get_mut(&event).ok_or(CUDA_ERROR_INVALID_HANDLE)? = Some((stream, end));
        Ok(())
    }

    pub fn destroy_event(&mut self, event: usize) -> Result<(), CUresult> {
        self.events.remove(&event).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    /// Makes a stream wait for an event. An event that was never recorded is complete.
    pub fn wait(&mut self, stream: usize, event: usize) -> Result<(), CUresult> {
        match *self.events.get(&event).ok_or(CUDA_ERROR_INVALID_HANDLE)? {
            Some((of, end)) => self.push(stream, Work::Wait(of, end)),
            None => Ok(()),
        }
    }

    /// Does the work before an event.
    pub fn synchronize(&mut self, event: usize) -> Result<(), CUresult> {
        match *self.events.get(&event).ok_or(CUDA_ERROR_INVALID_HANDLE)? {
            Some((stream, end)) => self.run(stream, end),
            None => Ok(()),
        }
    }

    /// Does all work of a stream.
    pub fn finish(&mut self, stream: usize) -> Result<(), CUresult> {
        let end = self.streams.get(stream).ok_or(CUDA_ERROR_INVALID_HANDLE)?.end();
        self.run(stream, end)
    }

    /// Does all work.
    pub fn finish_all(&mut self) -> Result<(), CUresult> {
        (0..self.streams.len()).try_for_each(|stream| self.finish(stream))
    }

    /// Does the work of a stream up to an amount, after the work that it waits for.
    fn run(&mut self, stream: usize, end: u64) -> Result<(), CUresult> {
        while self.streams[stream].done < end {
            let work = self.streams[stream].waiting.pop_front().expect("counted");
            let done = match work {
                Work::Wait(of, end) => self.run(of, end),
                Work::Launch(launch) => launch.run(&self.memory),
                Work::Free(address) => self.memory.free(address),
                Work::Copy(copy) => self.copy_now(copy),
            };
            self.streams[stream].done += 1;
            if let Err(error) = done {
                self.failed.get_or_insert(error);
                return Err(error);
            }
        }
        Ok(())
    }

    fn copy_now(&self, copy: Copy) -> Result<(), CUresult> {
        let host = |place: Place, pitch: usize| match place {
            Place::Host(host) => Some(host as *mut u8),
            Place::Device(address) => self.memory.locate(address, (copy.height - 1) * pitch + copy.width),
        };
        if copy.width == 0 || copy.height == 0 {
            return Ok(());
        }
        let (from, to) = (host(copy.from, copy.from_pitch), host(copy.to, copy.to_pitch));
        let (Some(from), Some(to)) = (from, to) else {
            return Err(refused(&format!("{copy:?} of memory that was freed"), CUDA_ERROR_ILLEGAL_ADDRESS));
        };
        for row in 0..copy.height {
            // SAFETY: device ranges are inside of allocations. The caller keeps host memory until the
            // work is done.
            unsafe {
                let to = to.add(row * copy.to_pitch);
                match self.check_only {
                    true => to.write_bytes(0, copy.width),
                    false => to.copy_from_nonoverlapping(from.add(row * copy.from_pitch), copy.width),
                }
            }
        }
        Ok(())
    }
}
